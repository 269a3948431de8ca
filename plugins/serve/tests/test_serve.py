"""`rlhf serve`: real requests to real server processes, whose scores are those of plain
transformers on the exported folder."""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from served import ANSWERS, QUESTION, TOKEN, Response, Served, score, serving, train
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from rlhf.cli import main
from rlhf.scorer import open_scorer
from rlhf_serve.dialects import DIALECTS


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a process reward model."""
    return train("prm", "stepwise", tmp_path_factory.mktemp("prm"))


@pytest.fixture(scope="module")
def step_server(steps: Path) -> Iterator[Served]:
    """A server of the process reward model."""
    with serving(steps / "model", "--token", TOKEN) as served:
        yield served


class Plain:
    """The exported reward model in plain transformers."""

    def __init__(self, run: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(run / "model")
        self.model = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()

    def reward(self, ids: list[int]) -> float:
        with torch.no_grad():
            return float(self.model(input_ids=torch.tensor([ids])).logits)

    def of_text(self, text: str) -> float:
        """The reward of a text with all its special tokens in it."""
        return self.reward(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def whole(self, prompt: str, answer: str) -> str:
        """A prompt and its answer with their special tokens."""
        return f"{self.tokenizer.bos_token}{prompt}{answer}{self.tokenizer.eos_token}"

    def of_conversation(self, answer: str) -> float:
        return self.of_text(self.rendered(answer))

    def rendered(self, answer: str) -> str:
        messages = [*QUESTION, {"role": "assistant", "content": answer}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))


@pytest.fixture(scope="module")
def plain(rewards: Path) -> Plain:
    return Plain(rewards)


def test_answers_of_a_conversation_get_the_rewards_of_plain_transformers(
    server: Served, plain: Plain
) -> None:
    turn = [{"role": "assistant", "content": ANSWERS[0]}]
    response = server.post("/v1/score", score(*ANSWERS, turn))
    expected = [plain.of_conversation(answer) for answer in (*ANSWERS, ANSWERS[0])]
    assert response.status == 200
    (item,) = response.body["items"]
    assert item["scores"] == pytest.approx(expected, abs=1e-5)


def test_answers_of_a_text_get_the_rewards_of_plain_transformers(
    server: Served, plain: Plain
) -> None:
    items = [{"prompt": f"What is 2 + {n}?", "answers": ANSWERS[n:]} for n in range(3)]
    response = server.post("/v1/score", {"items": items})
    found = [item["scores"] for item in response.body["items"]]
    for item, rewards in zip(items, found, strict=True):
        texts = [plain.whole(str(item["prompt"]), answer) for answer in item["answers"]]
        assert rewards == pytest.approx([plain.of_text(text) for text in texts], abs=1e-5)


def test_a_prompt_is_computed_once_for_its_answers(server: Served, plain: Plain) -> None:
    prompt, answers = "What is 2 + 2? " * 5, ["4", "5", "6"]
    before = server.metric("rlhf_batch_tokens_sum")
    assert server.post("/v1/score", score(*answers, prompt=prompt)).status == 200
    computed = server.metric("rlhf_batch_tokens_sum") - before
    assert computed == len(plain.tokenizer(prompt)["input_ids"]) + 2 * len(answers)
    # The special tokens of OpenRLHF's queries are in the text; equal prompts are shared.
    queries = [plain.whole(prompt, answer) for answer in answers]
    body = {"query": queries, "prompts": [prompt] * 3, "labels": [None] * 3}
    assert server.post("/get_reward", body).status == 200
    assert server.metric("rlhf_batch_tokens_sum") - before == 2 * computed


def test_answers_that_do_not_fit_one_forward_pass_are_divided(server: Served, plain: Plain) -> None:
    answers = [f"The answer is {number}." for number in range(40)]
    before = server.metric("rlhf_batch_tokens_count")
    found = server.post("/v1/score", score(*answers)).body["items"][0]["scores"]
    assert found == pytest.approx([plain.of_conversation(each) for each in answers], abs=1e-5)
    assert server.metric("rlhf_batch_tokens_count") > before + 1


def test_openrlhf_gets_the_rewards_of_whole_texts(server: Served, plain: Plain) -> None:
    texts = [plain.rendered(ANSWERS[0]), plain.whole("", "5"), plain.rendered(ANSWERS[2])]
    expected = pytest.approx([plain.of_text(text) for text in texts], abs=1e-5)
    body = {"query": texts, "prompts": ["a", "b", "a"], "labels": ["4", "", "4"]}
    for sent in (body, {"query": texts}):
        found = server.post("/get_reward", sent).body
        assert found == {"rewards": expected, "scores": expected, "extra_logs": {}}


def test_vllm_gets_the_logits_of_texts_ids_and_messages(server: Served, plain: Plain) -> None:
    text = plain.rendered(ANSWERS[0])
    ids = plain.tokenizer(text, add_special_tokens=False)["input_ids"]
    turn = {"role": "assistant", "content": ANSWERS[0]}
    bodies: list[dict[str, Any]] = [
        {"input": text, "add_special_tokens": False, "use_activation": False},
        {"input": [ids], "model": "any", "user": "somebody"},
        {"input": ids},
        {"messages": [*QUESTION, turn]},
    ]
    for body in bodies:
        found = server.post("/classify", body).body
        (item,) = found["data"]
        assert item["probs"] == pytest.approx([plain.of_text(text)], abs=1e-5)
        assert (item["index"], item["label"], item["num_classes"]) == (0, "reward", 1)
        assert (found["object"], found["usage"]["prompt_tokens"]) == ("list", len(ids))
    found = server.post("/classify", {"input": ["a text", "another"]}).body
    start = plain.tokenizer.bos_token
    expected = [plain.of_text(f"{start}{each}") for each in ("a text", "another")]
    assert [item["probs"][0] for item in found["data"]] == pytest.approx(expected, abs=1e-5)


def test_steps_get_the_probabilities_of_plain_transformers(
    step_server: Served, steps: Path
) -> None:
    prompt, solutions = "What is 2 + 2 + 3?", [["2 + 2 = 4", "4 + 3 = 8"], ["It is 7."]]
    response = step_server.post("/v1/score", score(*solutions, prompt=prompt))
    (item,) = response.body["items"]
    tokenizer = AutoTokenizer.from_pretrained(steps / "model")
    model = AutoModelForTokenClassification.from_pretrained(steps / "model").eval()
    (end,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    for found, solution in zip(item["scores"], solutions, strict=True):
        ids = tokenizer(prompt + "\n".join([*solution, ""]), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            odds = model(input_ids=ids).logits[0].diff(dim=-1).squeeze(-1)
        assert found == pytest.approx(odds[ids[0] == end].sigmoid().tolist(), abs=1e-5)


def test_a_process_reward_model_has_no_reward_of_a_whole_text(step_server: Served) -> None:
    reason = "this model scores the steps of an answer; send them to /v1/score"
    turn = {"role": "assistant", "content": "4"}
    for path, body in (
        ("/get_reward", {"query": ["a text"]}),
        ("/classify", {"input": "a text"}),
        ("/classify", {"input": [5, 6]}),
        ("/classify", {"messages": [*QUESTION, turn]}),
    ):
        assert step_server.post(path, body).refusal == (422, reason)
    refused = step_server.post("/v1/score", score("4"))
    assert refused.refusal == (422, "items[0]: answers[0] must be a list of steps: '4'")


def test_a_server_says_where_it_listens_and_makes_a_token(rewards: Path, server: Served) -> None:
    assert server.printed == (
        f"model      {rewards}/model (LlamaForSequenceClassification, fp32 on cpu)\n"
        "attention  tree: a prompt is computed once for all its answers, no padding\n"
        f"token      {TOKEN}\n"
        f"serving    {server.url}\n"
    )
    assert server.url.startswith("http://127.0.0.1:")


def test_metrics_count_requests_tokens_and_time(server: Served) -> None:
    answered = 'rlhf_requests_total{path="/v1/score",status="200"}'
    refused = 'rlhf_requests_total{path="/v1/score",status="422"}'
    before = server.metric(answered), server.metric(refused)
    server.post("/v1/score", score("4"))
    server.post("/v1/score", {})
    assert (server.metric(answered), server.metric(refused)) == (before[0] + 1, before[1] + 1)
    assert server.metric("rlhf_open_requests") == 0
    assert server.metric('rlhf_request_seconds_count{path="/v1/score"}') == before[0] + 1
    assert server.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_overload_is_refused_and_nothing_that_was_accepted_is_lost(
    rewards: Path, plain: Plain
) -> None:
    answers = [f"The answer is {number}." for number in range(400)]
    expected = [plain.of_conversation(answer) for answer in answers[:5]]
    with serving(rewards, "--token", "none", "--queue", "3", "--max-tokens", "512") as served:
        assert "token      none: anybody may send requests\n" in served.printed
        with ThreadPoolExecutor(12) as clients:

            def ask(_: int) -> Response:
                return served.post("/v1/score", score(*answers))

            responses = list(clients.map(ask, range(12)))
            accepted = [each for each in responses if each.status == 200]
            refused = [each for each in responses if each.status != 200]
            assert len(accepted) >= 3
            for each in refused:
                assert each.refusal == (503, "3 requests are waiting; try again later")
                assert each.headers["retry-after"] == "1"
            assert refused
            total = 'rlhf_requests_total{path="/v1/score",status="%d"}'
            assert served.metric(total % 200) == len(accepted)
            assert served.metric(total % 503) == len(refused)
            # A signal in the middle of the work: what is open is answered, then the server ends.
            waiting = [clients.submit(ask, number) for number in range(2)]
            while served.metric("rlhf_open_requests") < 2:
                time.sleep(0.01)
            served.process.send_signal(signal.SIGTERM)
            accepted += [each.result() for each in waiting]
        assert served.process.wait(30) == 0
        for each in accepted:
            (item,) = each.body["items"]
            assert len(item["scores"]) == len(answers)
            assert item["scores"][:5] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("path", ["/v1/score", "/get_reward", "/classify"])
def test_the_check_agrees_with_a_server_of_the_same_model(
    path: str, server: Served, rewards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "5"},
        {"prompt": QUESTION, "answers": ANSWERS, "ranks": [1, 3, 2]},
        {
            "chosen": [*QUESTION, {"role": "assistant", "content": "4"}],
            "rejected": [*QUESTION, {"role": "assistant", "content": "5"}],
        },
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["serve", "--check", server.url + path, str(rewards), str(file), "--token", TOKEN]
    assert main(words) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("7 scores of 3 rows, largest difference ")
    assert second == f"{server.url}{path} agrees with {rewards}/model (allowed: 0.001)"


def test_the_check_of_steps_agrees(
    step_server: Served, steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = str(steps.parent / "eval.jsonl")
    url = f"{step_server.url}/v1/score"
    assert main(["serve", "--check", url, str(steps), held_out, "--token", TOKEN]) == 0
    assert " rows, largest difference " in capsys.readouterr().out
    url = f"{step_server.url}/classify"
    assert main(["serve", "--check", url, str(steps), held_out, "--token", TOKEN]) == 2
    text = f"error: {steps}/model scores the steps of an answer; check it at /v1/score\n"
    assert capsys.readouterr().err == text


def test_the_check_finds_another_model(
    server: Served, rewards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "model"
    shutil.copytree(rewards / "model", other)
    model = AutoModelForSequenceClassification.from_pretrained(other)
    with torch.no_grad():
        model.score.weight *= 1.5
    model.save_pretrained(other)
    url = f"{server.url}/v1/score"
    rows = str(rewards.parent / "eval.jsonl")
    assert main(["serve", "--check", url, str(other), rows, "--token", TOKEN]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert f"at {rows} line " in first
    assert second == f"{url} does not agree with {other} (allowed: 0.001)"


def test_normalised_rewards_are_served_as_the_scorer_returns_them(
    rewards: Path, plain: Plain, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(rewards / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"reward_normalise": True}))
    scorer = open_scorer(model, device="cpu", dtype="auto")
    raw = plain.of_conversation(ANSWERS[0])
    normalised = (raw - config["reward_mean"]) / config["reward_std"]
    rows, response = DIALECTS["/v1/score"](score(ANSWERS[0]), scorer)
    (item,) = response(scorer.logits(rows))["items"]
    assert item["scores"] == pytest.approx([normalised], abs=1e-4)
    turn = {"role": "assistant", "content": ANSWERS[0]}
    rows, response = DIALECTS["/classify"]({"messages": [*QUESTION, turn]}, scorer)
    (item,) = response(scorer.logits(rows))["data"]
    assert item["probs"] == pytest.approx([raw], abs=1e-5)
