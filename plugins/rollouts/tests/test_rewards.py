"""Rewards bring functions of TRL unchanged; what fails is one line that names the answer."""

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from rlhf.errors import RLHFError
from rlhf_rollouts.rewards import Rewards, RewardSpec, Scores, pool
from rlhf_rollouts.rewards.answers import Answers
from rlhf_rollouts.rewards.functions import ANSWER, CALL, Call, Outcome, load
from rlhf_rollouts.rewards.worker import score, together

FILE = Path(__file__).with_name("reward_functions.py")


def line_of(code: str) -> str:
    """Return what errors call the line of FILE with some code."""
    lines = FILE.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if code in line)
    return f"({FILE.name}:{number})"


def spec(called: str, **settings: Any) -> RewardSpec:
    return RewardSpec(function=f"{FILE}:{called}", **settings)


def scored(rewards: Rewards, completions: Sequence[Any], **given: Any) -> Scores:
    """Score answers; by default to the same prompt, without columns."""
    count = len(completions)
    given = {"prompts": ["2 + 3?"] * count, "completion_ids": [[1]] * count, "columns": {},
             "trainer_state": {"global_step": 3}} | given  # fmt: skip
    return rewards(completions=completions, **given)


def outcome_of(name: str, completions: Sequence[Any], **columns: Any) -> Outcome:
    """Call a function in this process."""
    count = len(completions)
    call = Call(0, range(count), ["p"] * count, completions, [[1]] * count, columns)
    function = load(f"{FILE}:{name}", {})
    if function.is_async:
        return asyncio.run(together([call], [function], 5.0, {"global_step": 3}))[0]
    return score(call, function, {"global_step": 3})


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rewards]]:
    """Rewards that are closed after the test."""
    monkeypatch.setattr(pool, "GRACE", 0.1)
    made: list[Rewards] = []
    yield made
    for rewards in made:
        rewards.close()


def test_functions_of_trl_score_unchanged(closing: list[Rewards]) -> None:
    specs = [
        spec("length", weight=0.5), spec("whole"), spec("few", weight=0.0), spec("judge"),
        spec("an_object", when={"answer": "7"}), RewardSpec(function="number", name="right"),
    ]  # fmt: skip
    closing.append(rewards := Rewards(specs))
    result = scored(
        rewards, ["5", "no", "7"],
        prompts=["a", "a", "b"], completion_ids=np.array([[1, 2], [3, 4], [5, 6]]),
        columns={"answer": ["5", "?", "7"], "prompt": ["a", "a", "b"]},
        trainer_state=SimpleNamespace(global_step=3),
    )  # fmt: skip
    nan = math.nan
    expected = {
        "length": [1, 2, 1], "whole": [4, nan, 4], "few": [0, 1, 2], "judge": [1, 2, 1],
        "an_object": [nan, nan, 1], "right": [1, nan, 1],
    }  # fmt: skip
    assert list(result.by_name) == list(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(result.by_name[name], values)
    np.testing.assert_array_equal(result.total, [0.5 + 4 + 1 + 1, 1 + 2, 0.5 + 4 + 1 + 1 + 1])
    assert result.columns == {"last": [2, 4, 6], "right": [True, False, False]}
    assert result.metrics == {"calls": (3.0, 3.0), "size": (9.0, 3.0)}
    assert rewards.note == (
        "rewards    length x 0.5, whole x 1, few x 0, judge x 1, an_object x 1, right x 1"
    )


def test_a_reward_without_weight_scores_no_answer(closing: list[Rewards]) -> None:
    closing.append(rewards := Rewards([RewardSpec(function="number"), spec("few", weight=0.0)]))
    result = scored(rewards, ["5", "5"], columns={"answer": ["5", None]})
    np.testing.assert_array_equal(result.total, [1, math.nan])


def test_an_answer_that_no_reward_scores_has_no_total(closing: list[Rewards]) -> None:
    closing.append(rewards := Rewards([RewardSpec(function="number")]))
    result = scored(rewards, ["5", "5"], columns={"answer": ["5", None]})
    np.testing.assert_array_equal(result.total, [1, math.nan])


def test_conversations_are_passed_as_messages() -> None:
    prompts, answers = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "yo"}]
    call = Call(0, [0], [prompts], [answers], [[1]], {})
    assert score(call, load(f"{FILE}:of_messages", {}), {}).values == [4]


def test_scores_do_not_depend_on_the_number_of_workers(closing: list[Rewards]) -> None:
    prompts = [f"prompt {number // 24}" for number in range(240)]
    completions = [f"{number} " * (number % 7) for number in range(240)]
    ids = [[number, number % 5] for number in range(240)]
    given = {"prompts": prompts, "completion_ids": ids, "columns": {"answer": completions}}
    results = []
    for workers in (1, 3):
        specs = [spec("whole"), spec("process"), RewardSpec(function="repetition")]
        closing.append(rewards := Rewards(specs, workers=workers))
        results.append(scored(rewards, completions, **given))
    one, three = results
    for name in ("whole", "repetition"):
        np.testing.assert_array_equal(one.by_name[name], three.by_name[name])
    assert (one.columns, one.metrics) == (three.columns, three.metrics)
    # Calls have two whole prompts each.
    assert one.metrics == {"calls": (240.0, 240.0), "size": (48.0 * 240, 240.0)}
    processes = [len({*result.by_name["process"]}) for result in results]
    assert processes[0] == 1
    assert processes[1] > 1
    assert os.getpid() not in three.by_name["process"]


def test_a_call_has_whole_prompts() -> None:
    sizes = [40, 30, 20, 14, 100, 1]
    prompts = [str(n) for n, size in enumerate(sizes) for _ in range(size)]
    answers = Answers(prompts, prompts, [], {})
    parts = answers.parts(range(len(prompts)))
    assert [len(part) for part in parts] == [40, 64, 100, 1]


def test_asynchronous_calls_run_at_the_same_time(closing: list[Rewards]) -> None:
    closing.append(rewards := Rewards([spec("judge"), spec("second_judge")]))
    prompts = [str(number // 64) for number in range(512)]
    start = time.monotonic()
    scored(rewards, prompts, prompts=prompts)
    # 16 calls wait 0.3 s each.
    assert time.monotonic() - start < 2.4


OF_ANSWER = f"for {ANSWER}; return a finite number, or None for an answer that it cannot score"
A_LIST = f"for {CALL}; return a list with a number or None for each answer"
CORRECT = f"for {ANSWER}; correct the function, or return None for an answer that it cannot score"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("one_short", 0, f"returned a list of 1 for {CALL}; return one value for each"),
        ("gives", [1.0, math.nan], f"returned nan {OF_ANSWER}"),
        ("gives", [1.0, math.inf], f"returned inf {OF_ANSWER}"),
        ("gives", [1.0, "yes"], f"returned 'yes' {OF_ANSWER}"),
        ("gives", [1.0, "1"], f"returned '1' {OF_ANSWER}"),
        ("gives", [1.0, [1]], f"returned [1] {OF_ANSWER}"),
        ("gives", 1.0, f"returned 1.0 {A_LIST}"),
        ("gives", "ab", f"returned 'ab' {A_LIST}"),
        ("logs_too_few", 0, f"logged 1 values of 'column' for {CALL}; log one for each"),
        ("inverse", 0, f"raised ZeroDivisionError: division by zero {line_of('[1 / len')} "
         f"{CORRECT}"),
        ("leaves", 0, f"raised SystemExit: 3 {line_of('SystemExit')} {CORRECT}"),
        ("gives", ..., f"raised KeyError: 'value' {line_of('kwargs[')} {CORRECT}"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(name: str, value: Any, message: str) -> None:
    outcome = outcome_of(name, ["five", ""], **({} if value is ... else {"value": value}))
    assert (outcome.kind, outcome.text) == ("failed", message)


def test_an_error_names_the_reward_and_the_answer_and_keeps_the_traceback(
    closing: list[Rewards],
) -> None:
    closing.append(rewards := Rewards([spec("length"), spec("inverse", name="short")]))
    with pytest.raises(RLHFError) as raised:
        scored(rewards, ["five", "5", "", ""], prompts=["a", "a", "b", "b"])
    assert str(raised.value) == (
        f"reward 'short': raised ZeroDivisionError: division by zero {line_of('[1 / len')} for "
        "answer 3 of 4 ('' to 'b'); correct the function, or return None for an answer that it "
        "cannot score"
    )
    assert "return [1 / len(completion) for" in raised.value.__notes__[0]
    # The next rollout is scored.
    assert scored(rewards, ["five"]).total == [4.25]


def test_a_function_that_ends_its_process_is_named(closing: list[Rewards]) -> None:
    closing.append(rewards := Rewards([spec("dies")]))
    with pytest.raises(RLHFError) as raised:
        scored(rewards, ["5"])
    assert str(raised.value) == (
        "reward 'dies': its process ended with exit code 7 in a call for 1 answer to '2 + 3?'; "
        "correct the function"
    )


def test_an_error_of_a_call_names_its_first_prompt_and_row(closing: list[Rewards]) -> None:
    closing.append(rewards := Rewards([spec("one_short")]))
    for prompts, names in ((["a", "b"], "2 answers, the first to 'a'"), ("aa", "2 answers to 'a'")):
        for rows, where in (((), ""), (["p.jsonl line 7", "p.jsonl line 2"], " in p.jsonl line 7")):
            with pytest.raises(RLHFError) as raised:
                scored(rewards, ["five", "5"], prompts=prompts, rows=rows)
            assert str(raised.value) == (
                f"reward 'one_short': returned a list of 1 for {names}{where}; return one value "
                "for each"
            )


def test_an_error_of_an_answer_names_its_row(closing: list[Rewards]) -> None:
    closing.append(rewards := Rewards([spec("inverse")]))
    given: dict[str, Any] = {"prompts": ["a", "b"], "rows": ["p.jsonl line 7", "p.jsonl line 2"]}
    with pytest.raises(RLHFError) as raised:
        scored(rewards, ["five", ""], **given)
    assert " for answer 2 of 2 ('' to 'b' in p.jsonl line 2); " in str(raised.value)


def test_an_error_that_no_answer_raises_by_itself_names_the_call(closing: list[Rewards]) -> None:
    closing.append(rewards := Rewards([spec("no_more_than_one")]))
    with pytest.raises(RLHFError) as raised:
        scored(rewards, ["five", "5"], prompts=["a", "b"])
    assert str(raised.value) == (
        f"reward 'no_more_than_one': raised ValueError: too many {line_of('too many')} for 2 "
        "answers, the first to 'a', but for none of them by itself; correct the function, or "
        "return None for an answer that it cannot score"
    )


NO_TEXTS = "takes none of prompts, completions, completion_ids; add the parameter completions"


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("no_such_module:score", "", "no_such_module cannot be imported: ModuleNotFoundError: No "
         "module named 'no_such_module'"),
        ("{folder}/missing.py:score", "", "{folder}/missing.py does not exist; correct the "
         "path"),
        ("{folder}/mine.py:score", "def score(answer): ...", NO_TEXTS),
        ("{folder}/mine.py:scor", "def score(): ...", "{folder}/mine.py has no function 'scor'; "
         "available: score"),
        ("{folder}/mine.py:score", "score = 3", "{folder}/mine.py has no function 'score'; "
         "available: none"),
        ("{folder}/mine.py:score", "import os\nos.x", "{folder}/mine.py cannot be imported: "
         "AttributeError: module 'os' has no attribute 'x' (mine.py:2)"),
        ("{folder}/mine.py:score", "def", "{folder}/mine.py cannot be imported: SyntaxError: "
         "invalid syntax (mine.py, line 1)"),
    ],
)  # fmt: skip
def test_functions_are_found_and_checked_before_anything_loads(
    path: str, code: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(RLHFError) as raised:
        load(path.format(folder=tmp_path), {})
    assert str(raised.value) == message.format(folder=tmp_path)


def test_the_error_of_the_start_names_the_reward() -> None:
    with pytest.raises(RLHFError) as raised:
        Rewards([spec("length"), spec("no_texts")])
    assert str(raised.value) == f"reward 'no_texts': {NO_TEXTS}"


def test_options_are_keyword_arguments() -> None:
    call = Call(0, [0], ["p"], ["five"], [[1]], {"factor": [9]})
    assert score(call, load(f"{FILE}:scaled", {"factor": 2.0}), {}).values == [8.0]
    assert load(f"{FILE}:scaled", {}).columns == ("factor",)


def test_a_column_does_not_set_an_option_of_a_rule() -> None:
    call = Call(0, [0], ["p"], ["five"], [[5] * 5], {"size": [9], "penalty": [0]})
    assert score(call, load("repetition", {"size": 2}), {}).values == [-0.75]


def test_columns_that_rewards_need_are_checked(closing: list[Rewards]) -> None:
    specs = [RewardSpec(function="exact", when={"source": "gsm8k"}), spec("length")]
    closing.append(rewards := Rewards(specs))
    rewards.check_columns(["answer", "source", "completion_ids"])
    for columns, message in (
        ([], "reward 'exact' needs the column 'answer'; the rows have no columns"),
        (["answer", "id"], "reward 'exact' needs the column 'source'; the rows have answer and id"),
        (["completions"], "the rows have a column 'completions', which is an argument of every "
         "reward function; rename the column"),
    ):  # fmt: skip
        with pytest.raises(RLHFError, match=f"^{re.escape(message)}$"):
            rewards.check_columns(columns)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "a reward needs one of function, url and model"),
        ({"function": "exact", "url": "http://a:1"}, "a reward has only one of function and url; "
         "add another reward"),
        ({"url": "http://a:1", "options": {"a": 1}}, "options are arguments of a function; "
         "remove them"),
        ({"function": "exakt"}, "'exakt' is not a shipped rule; did you mean exact? available: "
         "exact, number, boxed, format, soft_overlong, repetition, and functions of yours as "
         "module:name or file.py:name"),
        ({"url": "localhost:8000"}, "'localhost:8000' is not the address of a server, such as "
         "http://HOST:8000"),
        ({"url": "http://any:secret@a:1"}, "must not have a user name or a token, since run "
         "folders record settings; set the token in the environment variable RLHF_TOKEN"),
    ],
)  # fmt: skip
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RewardSpec(**settings)


def test_the_list_of_rewards_is_checked() -> None:
    for specs, message in (
        ([], "rewards is empty; add a function, a url or a model"),
        ([RewardSpec(function="exact")] * 2, "2 rewards are called 'exact'; set `name` of the "
         "others"),
    ):  # fmt: skip
        with pytest.raises(RLHFError, match=f"^{re.escape(message)}$"):
            Rewards(specs)


def test_a_worker_that_hangs_is_killed_and_its_answers_are_unscorable(
    closing: list[Rewards], capsys: pytest.CaptureFixture[str]
) -> None:
    closing.append(rewards := Rewards([spec("hangs"), spec("length")], deadline=1.2))
    start = time.monotonic()
    result = scored(rewards, ["a", "hang", "b", "c", "d"], prompts=["p", "p", "q", "r", "r"])
    assert time.monotonic() - start < 10
    np.testing.assert_array_equal(result.by_name["hangs"], [math.nan, math.nan, 1, 1, 1])
    np.testing.assert_array_equal(result.total, [1, 4, 2, 2, 2])
    assert capsys.readouterr().err == (
        "warning: reward 'hangs': did not return in time for 2 answers to 'p'; they count as "
        "unscorable\n"
    )


def test_an_asynchronous_call_is_cancelled_at_the_deadline() -> None:
    calls = [Call(0, [0], ["p"], [text], [[1]], {}) for text in ("hang", "b")]
    functions = [load(f"{FILE}:hangs_too", {})]
    outcomes = asyncio.run(together(calls, functions, 0.05, {}))
    assert [outcome.kind for outcome in outcomes] == ["late", "scored"]


def test_a_function_that_hangs_for_most_answers_stops_the_run(closing: list[Rewards]) -> None:
    closing.append(rewards := Rewards([spec("hangs")], deadline=0.2))
    with pytest.raises(RLHFError) as raised:
        scored(rewards, ["hang", "hang", "b"], prompts=["p", "p", "q"])
    assert str(raised.value) == (
        "reward 'hangs': did not return in time for 2 of 3 answers; make the function faster, or "
        "raise the deadline of 0.2 s"
    )


def alive(number: int) -> bool:
    """Return whether a process runs that is not a zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_worker_ends_with_its_parent_while_a_function_hangs() -> None:
    program = f"""
from rlhf_rollouts.rewards import Rewards, RewardSpec
rewards = Rewards([RewardSpec(function="{FILE}:hangs")])
print(rewards._pool.workers[0].process.pid, flush=True)
rewards(prompts=["p"], completions=["hang"], completion_ids=[[1]], columns={{}}, trainer_state={{}})
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert alive(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 10
    while alive(worker) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(worker)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_a_function_has_started_ends_with_its_worker(
    closing: list[Rewards], tmp_path: Path
) -> None:
    closing.append(rewards := Rewards([spec("dies_with_a_child")]))
    number = tmp_path / "number"
    with pytest.raises(RLHFError, match="its process ended with exit code 7"):
        scored(rewards, ["a"], columns={"number": [str(number)]})
    child, end = int(number.read_text()), time.monotonic() + 10
    while alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(child)


def test_a_closed_object_leaves_no_process() -> None:
    rewards = Rewards([RewardSpec(function="repetition")])
    worker = rewards._pool.workers[0].process
    rewards.close()
    assert worker.returncode is not None


def test_a_state_of_any_kind_reaches_functions() -> None:
    from rlhf_rollouts.rewards.scoring import plain_state

    made = attrs.make_class("State", ["global_step"])(3)
    for state in (made, {"global_step": 3}, SimpleNamespace(global_step=3)):
        assert plain_state(state) == {"global_step": 3}


def test_entries_that_do_not_fit_the_answers_are_named(closing: list[Rewards]) -> None:
    closing.append(rewards := Rewards([RewardSpec(function="number")]))
    with pytest.raises(RLHFError, match="'answer' has 3 entries for 2 answers"):
        scored(rewards, ["5", "6"], columns={"answer": ["5"] * 3})


def test_the_scores_of_a_reward_model_have_to_be_finite(closing: list[Rewards]) -> None:
    closing.append(rewards := Rewards([RewardSpec(model="runs/rm", name="judge")]))
    with pytest.raises(RLHFError) as raised:
        scored(rewards, ["5", "6"], scored={"judge": np.array([1.0, math.nan])})
    assert str(raised.value) == (
        "reward 'judge': the model returned nan for answer 2 of 2 ('6' to '2 + 3?'); check its "
        "weights and its dtype"
    )


def test_a_reward_model_scores_only_the_rows_that_it_is_for(closing: list[Rewards]) -> None:
    closing.append(rewards := Rewards([RewardSpec(model="runs/rm", when={"source": "chat"})]))
    columns = {"source": ["chat", "math", "chat"]}
    of_model = {"model": np.array([1.0, math.inf, 3.0])}
    result = scored(rewards, ["a", "b", "c"], columns=columns, scored=of_model)
    np.testing.assert_array_equal(result.total, [1, math.nan, 3])
    with pytest.raises(RLHFError, match="reward 'model' needs the column 'source'"):
        rewards.check_columns(["prompt"])


def test_a_reward_model_needs_a_trainer_that_loads_it(closing: list[Rewards]) -> None:
    specs = [RewardSpec(model="runs/rm"), RewardSpec(function="repetition", weight=2.0)]
    closing.append(rewards := Rewards(specs))
    with pytest.raises(RLHFError) as raised:
        scored(rewards, ["5"])
    assert str(raised.value) == (
        "reward 'model': this trainer does not load reward models; start `rlhf serve` with the "
        "model, and set url in place of model"
    )
    result = scored(rewards, ["5"], completion_ids=[[1] * 4], scored={"model": np.array([0.25])})
    assert result.total == [0.25 - 1.0]
