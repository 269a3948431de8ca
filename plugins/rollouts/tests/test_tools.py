"""Answers of several turns: tools and environments, and how turns, calls and results become token
ids."""

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
from transformers import AutoTokenizer

from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.trainer import Example, Sample
from rlhf_demo import base_model_folder
from rlhf_rollouts.settings import Tools
from rlhf_rollouts.tools.calling import Calling
from rlhf_rollouts.tools.offer import offer
from rlhf_rollouts.tools.prompts import continued, with_tools
from rlhf_rollouts.tools.template import ToolTemplate
from rlhf_rollouts.tools.turns import Conversations, Turns
from rlhf_rollouts.tools.worker import Call
from rlhf_rollouts.written import answer_of, first_turns, spans_of, turn_seed

FILE = Path(__file__).with_name("tool_functions.py")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>"
    "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|user|><r>{{ message.content }}</r>"
    "{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Calls as in Qwen 3, and a line break after each turn, which belongs to what follows."""
END = "<|end|>"
ROW = {"prompt": [{"role": "user", "content": "How much?"}]}
FUNCTIONS = tuple(f"{FILE}:{name}" for name in ("add", "fail"))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(base_model_folder())
    found.chat_template = CHAT_TEMPLATE
    return found


class Scripted:
    """A run whose policy says what a script has for the answer, one turn after the other."""

    def __init__(self, tokenizer: Any, scripts: Sequence[Sequence[str]], max_tokens: int) -> None:
        self.tokenizer, self.notes = tokenizer, []  # type: ignore[var-annotated]
        self.config = SimpleNamespace(data=SimpleNamespace(max_tokens=max_tokens))
        self._said: dict[int, Iterator[str]] = {n: iter(it) for n, it in enumerate(scripts)}
        self.prompts: list[list[int]] = []
        """Of each turn."""

    def on_rank_zero(self, act: Callable[[], Any], *, share: bool = True) -> Any:
        return act()

    def sample(
        self, engine: Any, prompts: Any, *, seeds: Any, max_new_tokens: int, temperature: float
    ) -> list[Sample]:
        self.prompts += prompts
        drawn = []
        for seed in seeds:
            number = next(first for _, first in first_turns(seed) if first in self._said)
            text = next(self._said[number])
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"][:max_new_tokens]
            ended = tokens[-1] == self.tokenizer.eos_token_id
            drawn.append(Sample(tokens, [-1.0] * len(tokens), ended))
        return drawn


ENGINE: Any = SimpleNamespace(
    module=SimpleNamespace(
        causal=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: None))
    )
)


def talked(
    tokenizer: Any, scripts: Sequence[Sequence[str]], *, room: int = 300, max_tokens: int = 4096,
    row: dict[str, Any] = ROW, stop: str | None = None, run: Any = None, **settings: Any,
) -> Conversations:  # fmt: skip
    """Return the answers of the scripts to one row."""
    tools = Tools(**{"functions": FUNCTIONS, **settings})
    offered = offer(tools)
    prompt = with_tools(row, offered.schemas, tokenizer)
    run = run or Scripted(tokenizer, scripts, max_tokens)
    turns = Turns(run, tools, offered, workers=1, section="grpo")
    try:
        example = Example(prompt.prompt, [], columns=prompt.columns, row="train.jsonl line 1")
        told = turns(
            ENGINE, [example], [0], answers=len(scripts), max_new_tokens=room, temperature=1.0,
            stop=stop,
        )  # fmt: skip
        # The processes of the environments end with this function.
        rewards = None if told.rewards is None else told.rewards()
        return attrs.evolve(told, rewards=lambda: rewards)
    finally:
        turns.close()


def text_of(tokenizer: Any, sample: Sample) -> str:
    return str(tokenizer.decode(sample.tokens))


def test_masks_and_token_ids_are_those_of_trl(tokenizer: Any) -> None:
    """TRL 1.16, `GRPOTrainer._tool_call_loop` with these turns in place of its engine, its own
    template for Qwen 3 with the header and the end of this chat template,
    `max_tool_calling_iterations` 3 and `max_completion_length` 300."""
    scripts = [
        [f"just text{END}"],
        [f"I add.{call('add', a=2, b=3)}{END}", f"It is 5.{END}"],
        [
            f"{call('add', a=2, b=3)}{call('fail', a=7)}{END}", f"{call('nothing', x=1)}{END}",
            f"done{END}",
        ],
        [f'<tool_call>{{"name": "add", oops</tool_call>{END}'],
        [f"Twice.{call('add', a=1, b=1)}{END}", f"{'x' * 400}{END}"],
        [f"Again.{call('add', a=1, b=1)}{END}"] * 9,
    ]  # fmt: skip
    found = talked(tokenizer, scripts, max_iterations=3)
    (group,) = found.groups
    masks = [answer_of(sample).trained or [True] * len(sample.tokens) for sample in group]
    runs = [[(int(own), len(list(it))) for own, it in itertools.groupby(mask)] for mask in masks]
    assert runs == [
        [(1, 10)],
        [(1, 76), (0, 12), (1, 7)],
        [(1, 132), (0, 43), (1, 66), (0, 46), (1, 5)],
        [(1, 44)],
        [(1, 76), (0, 12), (1, 212)],
        [(1, 76), (0, 12), (1, 76), (0, 12), (1, 76), (0, 12), (1, 36)],
    ]
    digests = [hashlib.sha256(json.dumps(it.tokens).encode()).hexdigest()[:16] for it in group]
    assert digests == [
        "cc55747d82f83da9", "a9d6fbdc1fc5e8ab", "8ab2cbede73183fd", "48b12688880e019f",
        "3053e6f005e2b5c6", "6f1ef2638c02a14e",
    ]  # fmt: skip
    messages = found.completions[0][2]
    assert [(it["role"], it["content"]) for it in messages] == [
        ("assistant", ""), ("tool", "5"), ("tool", "{'error': '7 is no good'}"),
        ("assistant", ""), ("tool", "{'error': 'Tool nothing not found.'}"), ("assistant", "done"),
    ]  # fmt: skip
    # TRL: 8 calls, of which 2 fail.
    assert found.sums["tools/call_frequency"] == (8, 6)
    assert found.sums["tools/failure_frequency"] == (2, 8)
    assert found.sums["tools/malformed_frequency"] == (1, 6)
    assert [sample.finished for sample in group] == [True, True, True, True, False, False]


def test_a_turn_continues_from_exactly_the_ids_before_it(tokenizer: Any) -> None:
    scripts = [[f"{call('add', a=2, b=3)}{END}", f"{call('add', a=5, b=1)}{END}", f"6{END}"]]
    run = Scripted(tokenizer, scripts, 4096)
    (group,) = talked(tokenizer, scripts, run=run).groups
    (sample,) = group
    spans = spans_of(sample.logprobs)
    assert len(spans) == len(run.prompts) == 3
    asked = run.prompts[0]
    for prompt, (start, end) in zip(run.prompts, spans, strict=True):
        assert prompt == asked + sample.tokens[:start]
        assert not np.isnan(sample.logprobs[start:end]).any()
    between = sample.tokens[spans[0][1] : spans[1][0]]
    assert tokenizer.decode(between) == "\n<|user|><r>5</r>\n<|assistant|>"


def test_tools_stand_in_the_prompt(tokenizer: Any) -> None:
    schemas = offer(Tools(functions=FUNCTIONS)).schemas
    row = with_tools(ROW, schemas, tokenizer)
    assert tokenizer.decode(row.prompt) == (
        "<|begin|><|system|>add fail <|user|>How much?\n<|assistant|>"
    )
    assert row.columns["tools"] == schemas
    with pytest.raises(RLHFError) as caught:
        with_tools({"prompt": "text"}, schemas, tokenizer)
    assert str(caught.value) == (
        "`prompt` is text, but tools need a list of messages; rewrite the row"
    )
    with pytest.raises(RLHFError) as caught:
        with_tools({**ROW, "tools": schemas}, schemas, tokenizer)
    assert str(caught.value) == (
        "the row has `tools`, and so have the settings; remove one of the two"
    )


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("listed", {"a": 1}, "[1]"),
        ("slow", {"seconds": 0}, "rested"),
        ("half", {}, "?"),
        ("add", {"a": 1}, "missing 1 required positional argument"),
        ("hang", {"seconds": 60}, "{'error': 'did not return within 0.3 s'}"),
        ("slow", {"seconds": 60}, "{'error': 'did not return within 0.3 s'}"),
        ("leave", {}, "{'error': 'its process ended with exit code 3'}"),
    ],
)  # fmt: skip
def test_what_a_tool_does_is_the_result_that_the_policy_reads(
    name: str, arguments: Any, content: str, tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ("add", "listed", "slow", "half", "hang", "leave")
    functions = tuple(f"{FILE}:{each}" for each in names)
    scripts = [[f"{call(name, **arguments)}{END}", f"{call('add', a=1, b=1)}{END}", f"done{END}"]]
    found = talked(tokenizer, scripts, functions=functions, deadline=0.3)
    messages = found.completions[0][0]
    assert content in messages[1]["content"]
    # The processes still answer.
    assert messages[3]["content"] == "2"
    failed = "error" in messages[1]["content"]
    assert found.sums["tools/failure_frequency"] == (failed, 2)
    told = capfd.readouterr().err
    assert (f"warning: tool {name!r}: " in told) == failed
    assert told.count("\n") == failed
    # The place is one in the user's code.
    assert "worker.py" not in told


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else []


def test_calls_that_no_tool_can_get_are_malformed(tokenizer: Any) -> None:
    calls = [call("\ud800"), *(call("add", a=it, b=1) for it in ("\ud800", {"\ud800": 1}))]
    scripts = [[f"{each}{END}"] for each in (*calls, call("add", a=nested(200)))]
    found = talked(tokenizer, scripts, room=900)
    assert found.sums["tools/malformed_frequency"] == (4, 4)
    assert found.sums["tools/call_frequency"] == (0, 4)
    assert all(sample.finished for sample in found.groups[0])


def test_arguments_that_are_not_an_object_fail(tokenizer: Any) -> None:
    scripts = [[f'<tool_call>{{"name": "add", "arguments": [1, 2]}}</tool_call>{END}', f"ok{END}"]]
    found = talked(tokenizer, scripts)
    assert found.completions[0][0][1]["content"] == (
        "{'error': 'The arguments of add are not an object.'}"
    )


@pytest.mark.parametrize(("most", "turns"), [(0, 1), (1, 2), (None, 3)])
def test_so_many_turns_may_call_tools(most: int | None, turns: int, tokenizer: Any) -> None:
    scripts = [[f"{call('add', a=1, b=1)}{END}"] * 2 + [f"done{END}"]]
    found = talked(tokenizer, scripts, max_iterations=most)
    (sample,) = found.groups[0]
    assert len(spans_of(sample.logprobs)) == turns
    assert sample.finished == (most is None)
    assert found.completions[0][0][-1]["role"] == "assistant"


@pytest.mark.parametrize("limits", [{"room": 85}, {"max_tokens": 100}])
def test_results_without_room_end_the_answer_before_them(
    limits: dict[str, int], tokenizer: Any
) -> None:
    scripts = [[f"Some words{call('add', a=1, b=1)}{END}", f"done{END}"]]
    (sample,) = talked(tokenizer, scripts, **limits).groups[0]
    assert text_of(tokenizer, sample).endswith("</tool_call><|end|>")
    assert not np.isnan(sample.logprobs).any()
    assert not sample.finished


def test_a_turn_that_is_cut_calls_nothing(tokenizer: Any) -> None:
    found = talked(tokenizer, [[f"{call('add', a=1, b=1)}, and more{END}"]], room=75)
    assert found.sums["tools/call_frequency"] == (0, 1)
    assert not found.groups[0][0].finished


def test_a_pattern_that_ends_a_turn_is_followed_by_the_end_of_the_template(tokenizer: Any) -> None:
    scripts = [[f"{call('add', a=1, b=1)} and so on", f"done{END}"]]
    (sample,) = talked(tokenizer, scripts, stop="</tool_call>").groups[0]
    assert "</tool_call><|end|>\n<|user|><r>2</r>" in text_of(tokenizer, sample)
    (start, end), _ = spans_of(sample.logprobs)
    assert tokenizer.decode(sample.tokens[start:end]).endswith("</tool_call>")


def calling(deadline: float, **named: Any) -> Calling:
    """A process with tools of the file."""
    settings = Tools(deadline=deadline, **named)
    offered = offer(settings)
    return Calling(
        settings, workers=1, environment=offered.environment, asynchronous=offered.asynchronous
    )


def test_calls_of_asynchronous_functions_run_at_the_same_time() -> None:
    functions = tuple(f"{FILE}:{name}" for name in ("meet", "add", "slow", "stall"))
    calls = [
        Call(0, "meet", {"number": 3}), Call(0, "add", {"a": 1, "b": 2}), Call(0, "meet", {}),
        Call(0, "meet", {"number": 3}), Call(1, "stall", {"seconds": 60}),
        Call(1, "slow", {"seconds": 60}), Call(2, "meet", {"number": 3}),
    ]  # fmt: skip
    with closing(calling(0.5, functions=functions)) as tools:
        found = tools.results(calls)
        # What lets nothing else run is interrupted, and the process still answers.
        assert tools.results([Call(0, "slow", {"seconds": 0})])[0].value == "rested"
    late = "did not return within 0.5 s"
    assert [it.value or it.text for it in found] == [
        "met", "3", "meet() missing 1 required positional argument: 'number'", "met", late, late,
        "met",
    ]  # fmt: skip


def test_an_exception_without_a_text_ends_no_process() -> None:
    functions = tuple(f"{FILE}:{name}" for name in ("unprintable", "add"))
    with closing(calling(5.0, functions=functions)) as tools:
        failed, other = tools.results([Call(0, "unprintable"), Call(1, "add", {"a": 1, "b": 2})])
    assert (failed.kind, failed.text) == ("failed", "Unprintable")
    assert failed.reason.startswith("raised Unprintable: Unprintable (tool_functions.py:")
    assert other.value == "3"


def test_calls_of_asynchronous_methods_run_one_after_the_other_for_each_answer() -> None:
    def note(answer: int, text: str) -> Call:
        return Call(answer, "note", {"text": text}, of_environment=True)

    with closing(calling(5.0, environment=f"{FILE}:Diary")) as tools:
        assert tools.reset([{}, {}]) == [None, None]
        found = tools.results([note(0, "a"), note(0, "b"), note(1, "c"), note(1, "d")])
        assert [it.value for it in found] == ["a", "ab", "c", "cd"]
        assert tools.rewards(2) == [2, 2]
    with closing(calling(0.3, environment=f"{FILE}:Diary")) as tools:
        tools.reset([{}, {}])
        # A method that is not asynchronous keeps its place between the others of its answer, so
        # that these meet none of another answer.
        clear = Call(0, "clear", {}, of_environment=True)
        found = tools.results([note(0, "a"), clear, note(1, "b")])
        late = "did not return within 0.3 s"
        assert [it.value or it.text for it in found] == [late, "None", late]


COUNTER = {"functions": (), "environment": f"{FILE}:Counter"}


def test_each_answer_has_an_environment_of_its_own_that_rewards_it(tokenizer: Any) -> None:
    step = [f"{call('step', by=n)}{END}" for n in (1, 2, 3)]
    scripts = [[step[0], f"end{END}"], [step[1], step[2], f"end{END}"], [f"end{END}"]]
    found = talked(tokenizer, scripts, row={**ROW, "start": 10}, **COUNTER)
    assert [message["content"] for message in found.completions[0][1]] == [
        "", "at 12", "", "at 15", "end",
    ]  # fmt: skip
    assert found.rewards() == [11, 15, 10]
    (example,) = found.examples
    assert tokenizer.decode(example.prompt).endswith("How much? It starts at 10.\n<|assistant|>")
    assert example.columns["prompt"] == [{"role": "user", "content": "How much? It starts at 10."}]
    offered = offer(Tools(**COUNTER))
    assert [it["function"]["name"] for it in offered.schemas] == ["freeze", "stay", "step"]
    assert (offered.environment, offered.rewards) == ("Counter", True)


def test_the_text_of_reset_takes_the_room_of_answers(tokenizer: Any) -> None:
    scripts = [["x" * 200]]
    plain = talked(tokenizer, scripts, room=100, **COUNTER)
    begun = talked(tokenizer, scripts, room=100, row={**ROW, "start": 1}, **COUNTER)
    paths = [len(it.examples[0].prompt) + len(it.groups[0][0].tokens) for it in (plain, begun)]
    assert paths[0] == paths[1]
    with pytest.raises(SameOnAllRanks) as caught:
        talked(tokenizer, scripts, room=10, row={**ROW, "start": 1}, **COUNTER)
    assert re.fullmatch(
        r"environment Counter: the prompt of train.jsonl line 1 has \d+ tokens with the text of "
        r"reset, which leaves no room for an answer; raise grpo.max_new_tokens or data.max_tokens",
        str(caught.value),
    )


@pytest.mark.parametrize(
    "prompt",
    [
        [{"from": "human", "value": "a"}],
        {"role": "user", "content": "a"},
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    ],
    ids=["sharegpt", "mapping", "parts"],
)
def test_the_text_of_reset_continues_every_prompt(prompt: Any, tokenizer: Any) -> None:
    (message,) = continued(prompt, " b")
    assert message["role"] == "user"
    if isinstance(message["content"], list):
        assert [part["text"] for part in message["content"]] == ["a", " b"]
    else:
        assert message["content"] == "a b"
    assert continued([{"role": "user", "content": None}], "b") == [{"role": "user", "content": "b"}]


def test_an_environment_goes_on_after_a_call_that_is_late(tokenizer: Any) -> None:
    scripts = [
        [f"{call('stay', seconds=60)}{END}", f"{call('step', by=1)}{END}", f"end{END}"],
        [f"{call('step', by=2)}{END}", f"end{END}"],
    ]
    found = talked(tokenizer, scripts, deadline=0.3, **COUNTER)
    assert found.completions[0][0][1]["content"] == "{'error': 'did not return within 0.3 s'}"
    assert found.rewards() == [1, 2]


def test_an_answer_whose_environment_hangs_ends_without_a_reward(
    tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    scripts = [
        [f"{call('freeze', seconds=60)}{END}", f"{call('step', by=1)}{END}", f"end{END}"],
        [f"{call('step', by=1)}{END}", f"end{END}"],
    ]
    found = talked(tokenizer, scripts, deadline=0.3, **COUNTER)
    # Both are in the process that was ended.
    assert found.rewards() == [None, None]
    assert [sample.finished for sample in found.groups[0]] == [False, False]
    assert capfd.readouterr().err.splitlines()[-1] == (
        "warning: environment Counter: 2 answers without a reward, since the process of their "
        "environments has ended; they count as unscorable"
    )


def test_a_reward_of_an_environment_that_is_late_does_not_exist(
    tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"functions": (), "environment": f"{FILE}:Pensive"}
    assert talked(tokenizer, [[f"end{END}"]], deadline=0.3, **settings).rewards() == [None]
    assert capfd.readouterr().err == (
        "warning: environment Pensive: 1 answer without a reward, since get_reward did not return "
        "within 0.3 s; they count as unscorable\n"
    )


def test_a_decorated_method_is_called_by_its_name(tokenizer: Any) -> None:
    scripts = [[f"{call('step', by=2)}{END}", f"end{END}"]]
    settings: dict[str, Any] = {"functions": (), "environment": f"{FILE}:Decorated"}
    names = [it["function"]["name"] for it in offer(Tools(**settings)).schemas]
    assert names == ["freeze", "stay", "step"]
    assert talked(tokenizer, scripts, **settings).rewards() == [2]


def test_a_module_of_tools_may_lie_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "tools_of_this_folder.py").write_text(FILE.read_text())
    (tmp_path / "leaving.py").write_text("raise SystemExit('no')\n")
    (schema,) = offer(Tools(functions=("tools_of_this_folder:add",))).schemas
    assert schema["function"]["name"] == "add"
    with pytest.raises(RLHFError) as caught:
        offer(Tools(functions=("leaving:add",)))
    assert str(caught.value) == "leaving cannot be imported: SystemExit: no (leaving.py:1)"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Different", "reset returned different texts for answers to train.jsonl line 1; return "
         "one that depends only on the row"),
        ("Broken", "get_reward raised KeyError: 'nothing' (tool_functions.py:130); correct the "
         "class"),
    ],
)  # fmt: skip
def test_an_environment_that_fails_ends_the_run(name: str, problem: str, tokenizer: Any) -> None:
    with pytest.raises(RLHFError) as caught:
        talked(tokenizer, [[f"end{END}"]] * 2, functions=(), environment=f"{FILE}:{name}")
    # The scripted run does not share the errors of rank 0.
    assert isinstance(caught.value, SameOnAllRanks) == (name == "Different")
    assert str(caught.value) == f"environment {name}: {problem}"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"functions": (f"{FILE}:sub",)}, f"{FILE} has no function 'sub'; available: "),
        ({"functions": (f"{FILE}:add",) * 2}, "two tools are called 'add'; rename one"),
        ({"functions": (f"{FILE}:nameless",)},
         "no JSON schema can be made of the tool 'nameless': "),
        ({"environment": f"{FILE}:Endless"},
         "Endless has no method reset, which begins an episode; add it"),
        ({"environment": f"{FILE}:leaver"},
         "the environment cannot be made: SystemExit: no (tool_functions.py:"),
        ({"environment": f"{FILE}:Nobody"}, f"{FILE} has no class 'Nobody'; available: "),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_offered_are_refused(settings: Any, problem: str) -> None:
    with pytest.raises(RLHFError) as caught:
        offer(Tools(**settings))
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "the tokenizer has no chat template, which says how tools are called; set "
         "data.chat_template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "the chat template has no token "
         "after a call that ends it; set data.chat_template to one that does, such as that of the "
         "model's authors"),
        ("{% for m in messages %}{{ eos_token }}{% endfor %}", "the chat template does not render "
         "what a tool returns; set data.chat_template to one that does, such as that of the "
         "model's authors"),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", "the chat template "
         "does not render the available tools; set data.chat_template to one that does, such as "
         "that of the model's authors"),
        ("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
         "the calls that the chat template writes cannot be read; put a response_template into "
         "tokenizer_config.json, as transformers' page on response parsing describes"),
    ],
)  # fmt: skip
def test_a_chat_template_without_tools_is_refused(template: str | None, problem: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_model_folder())
    tokenizer.chat_template = template
    with pytest.raises(RLHFError) as caught:
        ToolTemplate(tokenizer, offer(Tools(functions=FUNCTIONS)).schemas)
    assert str(caught.value) == problem


def test_seeds_of_turns_are_different_and_known_again() -> None:
    seeds = [turn_seed(seed, turn) for seed in (5, 6, 2**63 - 1) for turn in range(20)]
    assert len({*seeds}) == 60
    assert turn_seed(5, 0) == 5
    assert (7, 6) in itertools.islice(first_turns(turn_seed(6, 7)), 8)
