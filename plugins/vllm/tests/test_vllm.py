"""The engine `vllm` in runs of GRPO, against a small server with vLLM's routes."""

import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import pytest
import torch
from attrs import field, frozen
from fake_vllm import GENERATE, FakeVLLM, Fault, Handler, serving, wait_until
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

import rlhf_demo
from rlhf.cli import main
from rlhf.errors import RLHFError
from rlhf.trainer import Sample
from rlhf_devkit import shared, tiny
from rlhf_devkit.curves import same_curve, without_timings
from rlhf_rollout_vllm import client, engine, transfer
from rlhf_rollout_vllm.client import Client
from rlhf_rollout_vllm.config import VLLMConfig, check
from rlhf_rollout_vllm.engine import VLLM
from rlhf_rollout_vllm.transfer import Transfer, WholeWeights, own_prefix
from rlhf_rollouts.embedded import Embedded
from rlhf_rollouts.tools.template import ToolTemplate, Turn


@frozen
class Inputs:
    """Words of a run of the tiny model in fp32."""

    words: list[str]
    model: Path
    cache: str


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("vllm")
    train = rlhf_demo.rows("arithmetic", "train", "prompt")
    model = tiny.make_model(folder / "model", ends_answers=True)
    (folder / "rewards.py").write_text(
        "def short(completions, completion_ids, **columns):\n"
        "    return [-float(len(ids)) for ids in completion_ids]\n"
    )
    words = [
        "--model", str(model), "--model.dtype", "fp32", "--data.workers", "0",
        "--data.train", str(tiny.write_rows(folder / "train.jsonl", train[:8])),
        "--batch.size", "4", "--batch.tokens", "2048", "--data.max_tokens", "64",
        "--checkpoint.every", "null", "--optim.lr", "1e-2", "--train.steps", "2",
        "--grpo.max_new_tokens", "6", "--grpo.answers", "4", "--grpo.truncated", "count",
        "--grpo.rewards", f"{folder / 'rewards.py'}:short", "--rollouts.engine", "vllm",
        "--rollouts.vllm.folder", str(folder), "--rollouts.vllm.bucket_gb", "2e-5",
    ]  # fmt: skip
    return Inputs(words, model, str(folder / "cache"))


def run(inputs: Inputs, output: Path, url: str, *more: str) -> tiny.Metrics:
    words = [*inputs.words, "--output", str(output), "--rollouts.vllm.url", url, *more]
    return tiny.run("grpo", words, inputs.cache, True)


def problem(act: Callable[[], Any]) -> str:
    with pytest.raises(RLHFError) as error:
        act()
    return str(error.value)


def test_a_run_learns_and_gets_the_same_curve_as_the_embedded_engine_with_these_answers(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--train.steps", "6")
    answers: list[list[Sample]] = []
    sample = VLLM.sample

    def recorded(*arguments: Any, **options: Any) -> list[Sample]:
        answers.append(sample(*arguments, **options))
        return answers[-1]

    with serving(inputs.model) as fake, patch.object(VLLM, "sample", recorded):
        curve = run(inputs, tmp_path / "vllm", fake.url, *more)
    rewards = [line["reward"] for line in curve]
    assert rewards[-1] > rewards[0] + 1
    # The weights of each step were there.
    assert max(line["sampling/sampling_logp_difference/max"] for line in curve) < 1e-4
    printed = capsys.readouterr().out
    assert f"\nrollouts   vLLM at {fake.url}\n" in printed
    assert "\nagreement  log-probabilities of " in printed
    lengths = {len(each.tokens) for drawn in answers for each in drawn}
    assert len(lengths) > 2
    finished = {each.finished for drawn in answers for each in drawn}
    assert finished == {True, False}
    replay = iter(answers)
    with patch.object(Embedded, "sample", lambda *arguments, **options: next(replay)):
        words = [*inputs.words[: inputs.words.index("--rollouts.engine")], *more]
        words += ["--output", str(tmp_path / "embedded")]
        expected = tiny.run("grpo", words, inputs.cache, True)
    sent = sum(value.nbytes for value in load_file(inputs.model / "model.safetensors").values())
    assert {line["sync/bytes"] for line in curve} == {sent}
    assert all(line["sync/seconds"] > 0 for line in curve)
    same_curve(without_timings(curve), without_timings(expected))


@pytest.mark.matrix
def test_two_ranks_with_divided_weights_get_the_curve_of_one(
    inputs: Inputs, tmp_path: Path
) -> None:
    with serving(inputs.model) as fake:
        one = run(inputs, tmp_path / "one", fake.url)
    with serving(inputs.model) as fake:
        words = [*inputs.words, "--output", str(tmp_path / "two"), "--rollouts.vllm.url", fake.url]
        words += ["--deepspeed.stage", "3"]
        two = shared(2).run(tiny.run, "grpo", words, inputs.cache, timeout=300)[0]
    assert fake.calls.count("/finish_weight_update") == 2
    same_curve(without_timings(two), without_timings(one))


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}"
    "<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def read(self: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Turn:
    """Count every second turn as a call: a model with random weights writes none."""
    call = {"name": "twice", "arguments": {"number": len(tokens)}}
    calls = [{"type": "function", "function": call}] if sum(tokens) % 2 else []
    return Turn({"role": "assistant", "content": ""} | ({"tool_calls": calls} if calls else {}))


def test_answers_in_several_turns_are_sent_as_the_tokens_that_were_drawn(
    inputs: Inputs, tmp_path: Path
) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    (tmp_path / "tools.py").write_text(
        "def twice(number: int) -> int:\n"
        '    """Double a number.\n\n    Args:\n        number: A number.\n    """\n'
        "    return 2 * number\n"
    )
    more = (
        "--data.chat_template", str(tmp_path / "template.jinja"), "--data.max_tokens", "128",
        "--grpo.tools", f"{tmp_path / 'tools.py'}:twice", "--grpo.max_new_tokens", "40",
        "--grpo.stop", "'[aeiou]'",
    )  # fmt: skip
    with serving(inputs.model, limit=128) as fake, patch.object(ToolTemplate, "read", read):
        curve = run(inputs, tmp_path / "run", fake.url, *more)
    assert all(line["tools/call_frequency"] > 0 for line in curve)
    assert all(line["tools/failure_frequency"] == 0 for line in curve)
    # The trainer computes every turn as the server has, behind the results.
    assert max(line["sampling/sampling_logp_difference/max"] for line in curve) < 1e-4
    # All turns of a rollout are drawn with the same weights.
    assert fake.calls.count("/finish_weight_update") == 2
    prompts = [each["token_ids"] for each in fake.requests]
    begun = [ids for ids in prompts if any(ids == other[: len(ids)] != other for other in prompts)]
    assert len(begun) >= 4


def test_weights_are_sent_once_for_each_rollout(inputs: Inputs, tmp_path: Path) -> None:
    held_out = inputs.words[inputs.words.index("--data.train") + 1]
    with serving(inputs.model) as fake:
        more = ("--data.eval", held_out, "--train.eval_at_start", "true", "--train.samples", "2")
        run(inputs, tmp_path / "run", fake.url, *more)
    # At the start one for evaluation, samples and the first rollout; then one after each step.
    assert fake.calls.count("/finish_weight_update") == 3
    assert fake.calls.count("/reset_prefix_cache") == 3
    assert fake.calls.count("/update_weights") > 3 * 2
    assert fake.calls.count("/init_weight_transfer_engine") == 1
    assert fake.version.endswith("-3")
    assert not fake.paused
    folder = Path(inputs.words[inputs.words.index("--rollouts.vllm.folder") + 1])
    assert not [*folder.glob("rlhf-vllm-*/*")]


def test_requests_have_their_own_seeds_and_change_nothing_of_the_distribution(
    inputs: Inputs, tmp_path: Path
) -> None:
    with serving(inputs.model) as fake:
        run(inputs, tmp_path / "run", fake.url, "--train.steps", "1",
            "--rollouts.vllm.concurrency", "3")  # fmt: skip
    drawn = [each for each in fake.requests if "prompt_logprobs" not in each["sampling_params"]]
    assert len(drawn) == 16
    assert fake.most_running <= 3
    sampling = [each["sampling_params"] for each in drawn]
    assert len({each.pop("seed") for each in sampling}) == 16
    assert all(each == sampling[0] for each in sampling)
    assert sampling[0] == {
        "n": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "detokenize": False, "temperature": 1.0,
        "max_tokens": 6, "logprobs": 0, "ignore_eos": True, "stop_token_ids": [2],
    }  # fmt: skip
    assert all(isinstance(token, int) for token in drawn[0]["token_ids"])


@pytest.mark.matrix
def test_an_adapter_is_sent_under_a_name_with_its_version(inputs: Inputs, tmp_path: Path) -> None:
    with serving(inputs.model, base=True) as fake:
        curve = run(inputs, tmp_path / "run", fake.url, "--lora", "4", "--optim.lr", "3e-2",
                    "--train.steps", "3")  # fmt: skip
    assert max(line["sampling/sampling_logp_difference/max"] for line in curve) < 1e-4
    assert len({line["loss"] for line in curve}) > 1
    (name,) = fake.adapters
    assert name.startswith("policy-")
    assert name.endswith("-3")
    assert not {"/start_weight_update", "/update_weights", "/pause"} & {*fake.calls}
    assert fake.version == "default"


def change(name: str, value: Any) -> Callable[[Any], Any]:
    """Return a change of one field of an answer."""

    def changed(response: Any) -> Any:
        if "choices" not in response or response["prompt_logprobs"] is not None:
            return response
        choice = response["choices"][0] | {name: value}
        return response | {"choices": [choice]} if name != "choices" else response | {name: value}

    return changed


def shifted(response: Any) -> Any:
    """Make drawn tokens more likely than they are."""
    for choice in response["choices"]:
        for each in choice["logprobs"]["content"]:
            each["logprob"] /= 2
    return response


TEXTS = 2
"""Texts of the canary: one for each prompt of `Ready`."""
FAULTS: dict[str, tuple[str, Fault, int, str]] = {
    "no models": (
        "/v1/models", (200, '{"data": []}'), 0,
        'URL/v1/models names no model with its max_model_len: {"data": []}; is this a vLLM server?',
    ),
    "no JSON": (
        "/v1/models", (200, "<html>hello</html>"), 0,
        "URL/v1/models returned a response that is not JSON: '<html>hello</html>'; is this a vLLM "
        "server?",
    ),
    "no dev mode": (
        "/pause", (404, '{"detail":"Not Found"}'), 0,
        "URL has no route /pause; start vLLM as docs/vllm.md says",
    ),
    "no scale out": (
        GENERATE, (404, '{"detail":"Not Found"}'), 0,
        f"URL has no route {GENERATE}; start vLLM as docs/vllm.md says",
    ),
    "dies during the transfer": (
        "/update_weights", "drop", 1,
        "URL/update_weights does not answer (Remote end closed connection without response); look "
        "at the output of the server",
    ),
    "no room for the weights": (
        "/update_weights", (500, "No space left on device"), 0,
        "URL/update_weights answered 500: No space left on device; look at the output of the "
        "server",
    ),
    "prefixes stay": (
        "/reset_prefix_cache", (200, '{"success": false}'), 0,
        "URL/reset_prefix_cache answered {'success': False}: the server still uses what it has "
        "computed with old weights; end its other requests",
    ),
    "other weights": (
        "/weight_info", (200, '{"weight_version": "other-1"}'), 0,
        "URL/weight_info answered {'weight_version': 'other-1'} after the weights 'RUN-1' were "
        "sent; does another run use this server?",
    ),
    "dies while answering": (
        GENERATE, "drop", TEXTS,
        f"URL{GENERATE} does not answer (Remote end closed connection without response); look at "
        "the output of the server",
    ),
    "fails while answering": (
        GENERATE, (500, "EngineCore\n has died"), TEXTS,
        f"URL{GENERATE} answered 500: EngineCore has died; look at the output of the server",
    ),
    "refuses": (
        GENERATE, (400, '{"error":{"message":"n too large"}}'), TEXTS,
        f'URL{GENERATE} answered 400: {{"error":{{"message":"n too large"}}}}; look at the output '
        "of the server",
    ),
    "fewer answers": (
        GENERATE, change("choices", []), TEXTS,
        f"URL{GENERATE} returned a response without one answer, its log-probabilities and its "
        'weight version: {"model": "policy", "choices": [], "prompt_logprobs": null}; use a vLLM '
        "of the versions in docs/vllm.md",
    ),
    "wrong version": (
        GENERATE, change("weight_versions", [{"version": "ab0101-0", "start": 0, "end": 9}]), TEXTS,
        f"URL{GENERATE} returned an answer of the weights RUN-0, not of RUN-1; does another run "
        "use this server?",
    ),
    "a strange token": (
        GENERATE, change("token_ids", [999]), TEXTS,
        f"URL{GENERATE} returned the token 999, but the trained model predicts 295 tokens; start "
        "the server with the model that is trained",
    ),
    "an early end": (
        GENERATE,
        lambda response: change("logprobs", {"content": [{"token_id": 5, "logprob": -1.0}]})(
            change("token_ids", [5])(response)
        ),
        TEXTS,
        f"URL{GENERATE} returned an answer of 1 tokens that ended with 'length', although it may "
        "have 6 and ends only with one of [2]",
    ),
    "other log-probabilities": (
        GENERATE, change("logprobs", {"content": [{"token_id": 5, "logprob": -1.0}]}), TEXTS,
        f"URL{GENERATE} returned log-probabilities that do not belong to its tokens",
    ),
}  # fmt: skip


@frozen
class Ready:
    """An engine of the backend, and what makes an engine of rollouts."""

    session: Any

    def sample(self, url: str, **settings: Any) -> list[Sample]:
        """Return two answers from the server."""
        return self.writer(url, **settings)()

    def writer(self, url: str, **settings: Any) -> Callable[[], list[Sample]]:
        """Return what writes two answers."""
        session = self.session
        section = attrs.evolve(session.config.rollouts.vllm, url=url, **settings)
        rollouts = attrs.evolve(session.config.rollouts, vllm=section)
        writer = VLLM(
            config=attrs.evolve(session.config, rollouts=rollouts), mesh=session.mesh,
            tokenizer=session.trainer.tokenizer, hooks=session.hooks,
        )  # fmt: skip
        return partial(
            writer.sample, session.engine, [[5, 6, 7, 8], [9, 10, 11]], seeds=[1, 2], ends=[2],
            max_new_tokens=6, max_tokens=64, temperature=1.0,
        )  # fmt: skip


@pytest.fixture(scope="module")
def ready(inputs: Inputs) -> Ready:
    words = [*inputs.words, "--rollouts.vllm.url", "http://127.0.0.1:1"]
    return Ready(tiny.in_plain_torch("grpo", words, inputs.cache)[1])


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES", (0.01, 0.01))
    monkeypatch.setattr(transfer, "ATTEMPTS", 2)


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_rollouts_leave_no_connections_open(ready: Ready, inputs: Inputs) -> None:
    with serving(inputs.model) as fake:
        write = ready.writer(fake.url)
        before = open_files()
        for _ in range(3):
            write()
        assert wait_until(lambda: open_files() <= before, seconds=3.0)


def plain_client(fake: FakeVLLM) -> Client:
    return Client(fake.url, seconds=10.0, explain=lambda seconds: None)


def test_a_connection_that_the_server_has_closed_is_not_used_again(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "timeout", 0.2)
    monkeypatch.setattr(client, "IDLE", 0.1)
    with serving(inputs.model) as fake:
        one = plain_client(fake)
        one.post("/pause", once=True)
        time.sleep(0.5)
        one.post("/resume", once=True)
    assert fake.calls == ["/pause", "/resume"]


def test_a_thread_without_a_connection_sends_nothing_after_abort(inputs: Inputs) -> None:
    with serving(inputs.model) as fake:
        one = plain_client(fake)
        one.abort()
        assert problem(lambda: one.post("/pause")) == (
            f"{fake.url}/pause does not answer (another request has failed); look at the output of "
            "the server"
        )
    assert not fake.calls


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:80000",
        "http://127.0.0.1:abc",
        "http://127.0.0.1:0",
        "http://[::1",
        "http:",
    ],
)
def test_a_url_without_a_port_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url .*: expected http://HOST:PORT$"):
        VLLMConfig(url=url)


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 8000), ("start_seconds", 60.0), ("restarts", 1), ("arguments", ("--x",))],
)
def test_settings_of_a_started_server_are_refused_beside_a_url(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        VLLMConfig(url="http://127.0.0.1:8000", **{name: value})
    assert str(error.value) == (
        f"{name}: only for a server that the run starts; set python instead of url, or remove it"
    )


@pytest.mark.parametrize("argument", ["--host", "--port=8000"])
def test_arguments_do_not_move_a_started_server(argument: str) -> None:
    with pytest.raises(ValueError) as error:
        VLLMConfig(python="python", arguments=(argument, "1"))
    assert str(error.value) == (
        f"arguments {argument[:6]}: the run chooses the address of its server; remove it, or set "
        "port"
    )


def test_a_folder_that_cannot_be_written_is_refused(
    ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # Root may write everywhere.
    config = ready.session.config
    folder = config.rollouts.vllm.folder
    assert problem(lambda: check(config)) == (
        f"rollouts.vllm.folder {folder} cannot be written; set it to a folder that can"
    )


def test_a_server_finds_weights_in_a_relative_folder(
    ready: Ready, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    paths: list[str] = []
    load = FakeVLLM.update_weights

    def seen(self: FakeVLLM, body: Any) -> Any:
        paths.append(body["update_info"]["path"])
        return load(self, body)

    with serving(inputs.model) as fake, patch.object(FakeVLLM, "update_weights", seen):
        ready.sample(fake.url, folder="weights")
    assert paths
    assert all(path.startswith(f"{tmp_path}/weights/rlhf-vllm-") for path in paths)


def test_weights_of_a_run_that_was_killed_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    processes = {"killed": ended.pid, "living": os.getppid()}
    folders = {name: tmp_path / f"{own_prefix()}{pid}-x" for name, pid in processes.items()}
    folders["other host"] = tmp_path / f"rlhf-vllm-other-1-{ended.pid}-x"
    for folder in folders.values():
        folder.mkdir()
        (folder / "0.safetensors").write_text("")
    one = Transfer(
        Client("http://host", seconds=1.0, explain=lambda seconds: None), "", 1, str(tmp_path)
    )
    assert one.folder.name.startswith(f"{own_prefix()}{os.getpid()}-")
    assert {*tmp_path.iterdir()} == {one.folder, folders["living"], folders["other host"]}


def test_a_second_model_is_refused(ready: Ready, inputs: Inputs) -> None:
    with serving(inputs.model) as fake:
        write: Any = ready.writer(fake.url)
        write()
        other = copy.copy(ready.session.engine)
        text = problem(lambda: write.func(other, *write.args[1:], **write.keywords))
    assert text == (
        "rollouts.engine vllm serves one model, but this trainer samples from several; use embedded"
    )


def test_the_text_that_compares_weights_fits_a_short_server(ready: Ready, inputs: Inputs) -> None:
    prompts = [[5, 6, 7, 8, 9, 10, 11]]
    with serving(inputs.model, limit=8) as fake:
        write: Any = ready.writer(fake.url)
        options = {**write.keywords, "max_tokens": 8, "seeds": [1]}
        assert len(write.func(write.args[0], prompts, **options)[0].tokens) == 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_server_is_one_line(
    name: str, ready: Ready, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.os, "urandom", lambda size: bytes.fromhex("ab0101"))
    path, fault, after, message = FAULTS[name]
    with serving(inputs.model) as fake:
        fake.faults[path], fake.after[path] = fault, after
        text = problem(lambda: ready.sample(fake.url))
    assert text.replace(fake.url, "URL") == message.replace("RUN", "ab0101")


def test_a_server_that_is_not_there_is_named(ready: Ready) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert problem(lambda: ready.sample(url)) == (
        f"{url}/v1/models does not answer ([Errno 111] Connection refused); look at the output of "
        "the server"
    )


def test_a_late_answer_ends_the_wait_for_the_others(ready: Ready, inputs: Inputs) -> None:
    with serving(inputs.model) as fake:
        fake.faults[GENERATE], fake.after[GENERATE] = "hang", TEXTS
        text = problem(lambda: ready.sample(fake.url, seconds=1.0))
    assert re.sub(r"within .* s;", "within N s;", text.replace(fake.url, "URL")) == (
        f"URL{GENERATE} did not answer within N s; look at the output of the server, or raise "
        "rollouts.vllm.seconds"
    )


def test_one_failure_ends_the_other_requests(ready: Ready, inputs: Inputs) -> None:
    with serving(inputs.model) as fake:
        write = ready.writer(fake.url)
        write()

        def held_back(response: Any) -> Any:
            if not isinstance(response, tuple):
                fake.ended.wait(60)
            return response

        fake.faults[GENERATE] = held_back
        fake.after[GENERATE] = 0
        began = time.monotonic()
        text = problem(lambda: draw_with_a_prompt_too_many(write, fake))
        assert time.monotonic() - began < 30
    assert text.startswith(f"{fake.url}{GENERATE} answered 400: ")


def draw_with_a_prompt_too_many(write: Any, fake: FakeVLLM) -> Any:
    """Ask for an answer that the server holds back, and for one that it refuses."""
    return write.func(write.args[0], [[5, 6], [9, 999]], **write.keywords)


def test_a_server_that_fails_for_a_while_is_asked_again(ready: Ready, inputs: Inputs) -> None:
    with serving(inputs.model) as fake:
        plain = ready.sample(fake.url)
        fake.faults[GENERATE], fake.after[GENERATE] = (503, "busy"), TEXTS + 1
        threading.Timer(0.05, fake.faults.clear).start()
        client.PAUSES = (0.2, 0.2, 1.0)
        assert ready.sample(fake.url) == plain


def test_a_server_with_other_weights_is_refused(ready: Ready, inputs: Inputs) -> None:
    with serving(inputs.model) as fake:
        fake.faults["/update_weights"] = (200, "{}")
        text = problem(lambda: ready.sample(fake.url))
    assert re.sub(r"-?\d+\.\d+", "N", text) == (
        "after transfer 1 of the weights the server does not have them: the mean log-probability "
        "of a text is N there and N here, which differ by N per token, more than "
        "rollouts.vllm.canary N; look for the model's family and its dtype in docs/vllm.md"
    )


def test_a_server_with_another_vocabulary_is_refused(
    ready: Ready, inputs: Inputs, tmp_path: Path
) -> None:
    settings = json.loads((inputs.model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"vocab_size": 290}))
    with serving(tmp_path) as fake:
        text = problem(lambda: ready.sample(fake.url))
        assert text.startswith(f"{fake.url}/update_weights answered 500: ")
        fake.faults["/update_weights"] = (200, "{}")
        text = problem(lambda: ready.sample(fake.url))
    assert text == (
        f"{fake.url} serves a model without the token 294, the last one that the trained model "
        "has; start the server with the model that is trained"
    )


def test_log_probabilities_that_are_not_the_trainers_are_refused(
    ready: Ready, inputs: Inputs
) -> None:
    with serving(inputs.model) as fake:
        fake.faults[GENERATE], fake.after[GENERATE] = shifted, TEXTS
        text = problem(lambda: ready.sample(fake.url))
    assert re.sub(r"\d+(\.\d+)?", "N", text) == (
        "the server's log-probabilities of the N tokens of its first rollout differ from the "
        "trainer's by N on average, more than rollouts.vllm.agreement N; start it with "
        "--logprobs-mode processed_logprobs and the dtype of the run, or raise the limit"
    )


def test_a_prompt_that_does_not_fit_the_server_is_refused(ready: Ready, inputs: Inputs) -> None:
    with serving(inputs.model, limit=8) as fake:
        text = problem(lambda: ready.sample(fake.url))
    assert text == (
        "a prompt of 4 tokens and an answer of up to 6 do not fit into the server's "
        "--max-model-len 8; raise it, or lower data.max_tokens to 7"
    )


def test_a_full_folder_is_told_before_anything_is_written(
    ready: Ready, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "free_space", lambda folder: 1000)
    with serving(inputs.model) as fake:
        text = problem(lambda: ready.sample(fake.url, folder="/tmp"))
    assert text.startswith("rollouts.vllm.folder /tmp has 1e-06 GB left, and ")
    assert text.endswith(
        "GB of weights are to be written there; make room, lower rollouts.vllm.bucket_gb, or "
        "choose another folder"
    )


@pytest.mark.matrix
def test_a_run_whose_server_has_died_continues_with_another(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    more = ("--train.steps", "3", "--checkpoint.every", "1")
    with serving(inputs.model) as fake:
        whole = run(inputs, tmp_path / "whole", fake.url, *more)
    with serving(inputs.model) as fake:
        fake.faults["/start_weight_update"], fake.after["/start_weight_update"] = "drop", 2
        text = problem(lambda: run(inputs, output, fake.url, *more))
    assert text == (
        f"{fake.url}/start_weight_update does not answer (Remote end closed connection without "
        "response); look at the output of the server"
    )
    lines = (output / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    with serving(inputs.model) as fake:
        continued = run(inputs, output, fake.url, *more, "--resume")
    assert [line["loss"] for line in continued] == [line["loss"] for line in whole]


LAG = ("--rollouts.lag", "1", "--train.steps", "5", "--checkpoint.every", "null")
"""Each rollout serves one step."""


@frozen
class Watched:
    """Drawings and steps of runs in this process. The first drawing ends before the first step, and
    the second one has to wait for the end of that step."""

    events: list[str] = field(factory=list)
    stepped: threading.Event = field(factory=threading.Event)
    waited: list[bool] = field(factory=list)
    """Whether the step came while the second drawing was under way."""
    at_second: Callable[[], None] = lambda: None
    """Called when it begins."""

    def draw(self, *arguments: Any, **options: Any) -> list[Sample]:
        self.events.append("draw")
        if self.events.count("draw") == 2:
            self.at_second()
            self.waited.append(self.stepped.wait(30))
        samples = draw(*arguments, **options)
        self.events.append("drawn")
        return samples

    def step(self, *arguments: Any) -> None:
        self.events.append("step")
        self.stepped.set()


draw = engine.draw


@contextmanager
def watching(watched: Watched) -> Iterator[Watched]:
    """Watch the runs of this block."""
    hook = register_optimizer_step_post_hook(watched.step)
    with patch.object(engine, "draw", watched.draw):
        try:
            yield watched
        finally:
            hook.remove()


@pytest.fixture(scope="module")
def lagging(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tiny.Metrics:
    """A run with a lag, whose second drawing ends after its first step."""
    with serving(inputs.model) as fake, watching(Watched()) as watched:
        metrics = run(inputs, tmp_path_factory.mktemp("lag") / "run", fake.url, *LAG)
    assert watched.waited == [True]
    assert watched.events[:5] == ["draw", "drawn", "draw", "step", "drawn"]
    assert [watched.events.count(name) for name in ("draw", "drawn", "step")] == [5, 5, 5]
    # Nothing is sent before the last step, whose answers are there.
    assert fake.calls.count("/finish_weight_update") == 4
    return plain(metrics)


def plain(metrics: tiny.Metrics) -> tiny.Metrics:
    return without_timings([line for line in metrics if "loss" in line])


def test_answers_that_are_written_while_the_run_trains_are_those_written_before(
    inputs: Inputs, tmp_path: Path, lagging: tiny.Metrics
) -> None:
    begin = VLLM.begin

    def written(*arguments: Any, **options: Any) -> Callable[[], list[Sample]]:
        drawn = begin(*arguments, **options)()
        return lambda: drawn

    with serving(inputs.model) as fake, patch.object(VLLM, "begin", written):
        assert plain(run(inputs, tmp_path / "run", fake.url, *LAG)) == lagging


def test_a_drawing_that_fails_while_the_run_trains_ends_it_with_one_line_and_is_done_again(
    inputs: Inputs, tmp_path: Path, lagging: tiny.Metrics
) -> None:
    output, more = tmp_path / "run", (*LAG, "--checkpoint.every", "1")
    with serving(inputs.model) as fake:
        # After the four texts of the canary with the first two drawings of 16 answers, and another
        # canary.
        fake.faults[GENERATE], fake.after[GENERATE] = (400, "no memory"), 4 + 2 * 16 + 4
        text = problem(lambda: run(inputs, output, fake.url, *more))
    assert text == f"{fake.url}{GENERATE} answered 400: no memory; look at the output of the server"
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-000001"]
    with serving(inputs.model) as fake:
        assert plain(run(inputs, output, fake.url, *more, "--resume")) == lagging


def test_a_signal_while_the_server_writes_stops_the_run_with_its_answers(
    inputs: Inputs, tmp_path: Path, lagging: tiny.Metrics
) -> None:
    output = tmp_path / "run"
    stop = partial(os.kill, os.getpid(), signal.SIGTERM)
    with (
        serving(inputs.model) as fake,
        watching(Watched(at_second=stop)) as watched,
        pytest.raises(AssertionError, match="stopped by a signal"),
    ):
        run(inputs, output, fake.url, *LAG)
    assert watched.events == ["draw", "drawn", "draw", "step", "drawn"]
    with serving(inputs.model) as fake:
        assert plain(run(inputs, output, fake.url, *LAG, "--resume")) == lagging
        # Those of the second step are not drawn again.
        assert sum("seed" in each["sampling_params"] for each in fake.requests) == 3 * 16


def test_weights_that_a_server_does_not_load_keep_no_process_alive(
    inputs: Inputs, tmp_path: Path
) -> None:
    with serving(inputs.model) as fake:
        fake.faults["/update_weights"] = "hang"
        transfer = WholeWeights(plain_client(fake), "policy", 64, str(tmp_path))
        transfer.begin()
        before = {*threading.enumerate()}
        transfer.put({"weight": torch.zeros(2)})
        assert wait_until(lambda: "/update_weights" in fake.calls)
        assert all(thread.daemon for thread in {*threading.enumerate()} - before)


def test_a_drawing_that_hangs_does_not_keep_a_process_alive(tmp_path: Path) -> None:
    code = (
        "import time\nfrom rlhf_rollout_vllm.threads import in_background, in_parallel\n"
        "hang = lambda: time.sleep(60)\n"
        "in_background(lambda: in_parallel([hang] * 2, threads=2, on_error=print))\n"
        "time.sleep(0.1)\nraise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 3


def test_an_error_of_the_server_is_one_line_with_exit_code_2(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(inputs.model) as fake:
        fake.faults["/v1/models"] = (401, "Unauthorized")
        words = [*inputs.words, "--output", str(tmp_path / "run")]
        with patch.dict("os.environ", {"RLHF_CACHE": inputs.cache}):
            assert main(["run", "grpo", *words, "--rollouts.vllm.url", fake.url]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {fake.url}/v1/models answered 401: Unauthorized; look at the output of the server"
    )
