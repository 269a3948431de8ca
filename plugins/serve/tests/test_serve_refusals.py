"""What `rlhf serve` refuses: requests, clients without the token, and what cannot be served."""

import base64
import json
import shutil
import socket
from pathlib import Path

import pytest
from served import TOKEN, Served, score

from rlhf.cli import main

BAD = {
    "not JSON": ("/v1/score", b"{", "not valid JSON: Expecting property name enclosed in double "
                 "quotes: line 1 column 2 (char 1)"),
    "no UTF-8": ("/v1/score", b"\xff", "the body is not UTF-8"),
    "half a character": ("/v1/score", b'{"items": "\\ud800"}',
                         "'\\ud800' is half of a surrogate pair; write both halves"),
    "a list": ("/v1/score", [], "the body must be a JSON object, not []"),
    "no items": ("/v1/score", {}, "items is missing"),
    "empty items": ("/v1/score", {"items": []}, "items is empty"),
    "an item of text": ("/v1/score", {"items": ["a"]}, "items[0]: an item must be an object, not "
                        "text"),
    "an unknown key": ("/v1/score", {"items": [{"prompt": "a", "answer": "b"}]},
                       "items[0]: answers is missing"),
    "a key too many": ("/v1/score", {"items": [], "top": 1}, "unknown key 'top'; available: items"),
    "answers of text": ("/v1/score", {"items": [{"prompt": "a", "answers": "b"}]},
                        "items[0]: answers must be a list, not text"),
    "a number": ("/v1/score", score(5), "items[0]: `answers[0]` must be text or a list of "
                 "messages, not int"),
    "no role": ("/v1/score", score("a", prompt=[{"content": "b"}]),
                'items[0]: message 0 of `prompt` has no `role`: {"content": "b"}'),
    "no answer": ("/v1/score", score([{"role": "user", "content": "b"}]), "items[0]: `answers[0]` "
                  "has no turn of the assistant after the prompt; end it with one"),
    "too long": ("/v1/score", score("4" * 300), "a prompt with its answer has 312 tokens; this "
                 "server takes at most 256"),
    "no query": ("/get_reward", {"prompts": ["a"]}, "query is missing"),
    "a query of a number": ("/get_reward", {"query": [5]}, "query[0] must be text, not int"),
    "an empty query": ("/get_reward", {"query": ["a", ""]}, "query[1] has no tokens"),
    "too few prompts": ("/get_reward", {"query": ["a", "b"], "prompts": ["a"]},
                        "1 prompts for 2 queries; send one for each"),
    "an activation": ("/classify", {"input": "a", "use_activation": True},
                      "use_activation must be false: a reward has no activation"),
    "no input": ("/classify", {"model": "a"}, "input is missing"),
    "an unknown token": ("/classify", {"input": [1, 295]}, "token 295 is not one of the model's "
                         "295"),
    "an option of vLLM": ("/classify", {"input": "a", "truncate_prompt_tokens": 5},
                          "unknown key 'truncate_prompt_tokens'; available: input, model, user, "
                          "use_activation, add_special_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_the_reason(name: str, server: Served) -> None:
    path, body, reason = BAD[name]
    assert server.post(path, body).refusal == (422, reason)


def test_requests_without_the_token_are_refused(server: Served) -> None:
    reason = "send the header `Authorization: Bearer TOKEN` with this server's token"
    password = base64.b64encode(f"any:{TOKEN}".encode()).decode()
    for wrong in ("", "Bearer", "Bearer other", f"Token{TOKEN}", "Basic x", "Bearer caf\xe9"):
        for path in ("/v1/score", "/get_reward", "/classify"):
            assert server.post(path, {}, authorization=wrong).refusal == (401, reason)
        assert server.get("/metrics", authorization=wrong).refusal == (401, reason)
        healthy = server.get("/health", authorization=wrong)
        assert (healthy.status, healthy.body) == (200, {"status": "ok"})
    # As clients send the password of a URL.
    query = {"query": ["a text"]}
    assert server.post("/get_reward", query, authorization=f"Basic {password}").status == 200
    assert server.post("/v1/other", {}).status == 404
    assert server.get("/v1/score").status == 405


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error of `rlhf serve WORDS`."""
    assert main(["serve", *words]) == 2
    return capsys.readouterr().err.removeprefix("error: ").rstrip("\n")


def test_a_folder_that_cannot_be_served_is_refused_before_a_model_loads(
    rewards: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["--token", "none", "--port", "0"]
    language_model = rewards.parent / "model"
    assert refused(capsys, str(language_model), *words) == (
        f"{language_model} has no config.json that names a trainer with a scorer; pass the model/ "
        "folder of a run of rm or prm, or of another trainer with a scorer"
    )
    other = tmp_path / "other"
    shutil.copytree(rewards / "model", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rlhf_trainer": "sft"}))
    assert refused(capsys, str(other), *words) == (
        f"trainer 'sft' of rlhf-plugin-sft 0.1.0 has no scorer, so {other} cannot be served"
    )
    gone = tmp_path / "gone"
    assert refused(capsys, str(gone), *words) == (
        f"{gone} has no trained model; pass a run with model/, or a model folder"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert refused(capsys, str(rewards), "--port", port) == (
            f"cannot serve at 127.0.0.1 port {port} ([Errno 98] Address already in use); choose "
            "another --port or --host"
        )
    assert refused(capsys, str(rewards), "--port", "70000") == (
        "cannot serve at 127.0.0.1 port 70000 (bind(): port must be 0-65535); choose another "
        "--port or --host"
    )
    for words, reason in (
        (["--host", "\xfc.."], "cannot serve at \xfc.. port 0 ("),
        (["--device", "foo"], "--device foo cannot be used (Expected one of cpu, cuda"),
    ):
        assert refused(capsys, str(rewards), "--port", "0", *words).startswith(reason)
    (other / "config.json").write_text("[]")
    assert "has no config.json that names" in refused(capsys, str(other), "--port", "0")
    (other / "config.json").write_text(json.dumps(config))
    (other / "tokenizer.json").write_text("{")
    damaged = f"{other}/tokenizer.json is truncated, or not a JSON file; download it again"
    assert refused(capsys, str(other), "--port", "0") == damaged
    together = "--check URL and DATA belong together: rlhf serve --check URL MODEL DATA"
    assert refused(capsys, str(rewards), "rows.jsonl") == together
    assert refused(capsys, str(rewards), "--check", "http://127.0.0.1:1/classify") == together


def test_a_check_that_cannot_be_made_says_why(
    server: Served, rewards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, empty, number = (
        str(rewards.parent / "eval.jsonl"), str(tmp_path / "e.jsonl"), str(tmp_path / "n.jsonl"),
    )  # fmt: skip
    Path(empty).write_text("")
    Path(number).write_text('{"prompt": "a", "answers": 5}\n')
    for url, data, reason in (
        ("http://127.0.0.1:1", rows, "--check http://127.0.0.1:1 must end with one of /v1/score, "
         "/get_reward, /classify"),
        ("http://127.0.0.1:1/classify", rows, "cannot reach http://127.0.0.1:1/classify, or its "
         "response is not JSON (<urlopen error [Errno 111] Connection refused>); check the "
         "address"),
        (f"{server.url}/classify", rows, f"{rows} line 1: {server.url}/classify answered 401: "
         '{"error":"send the header `Authorization: Bearer TOKEN` with this server\'s token"}'),
        (f"{server.url}/classify", f"{tmp_path}/gone.jsonl",
         f"data.eval: no such file or folder: {tmp_path}/gone.jsonl"),
        ("http://[::1/classify", rows,
         "--check http://[::1/classify is not a URL: Invalid IPv6 URL"),
        ("http://127.0.0.1:a/classify", rows, "cannot reach http://127.0.0.1:a/classify, or its "
         "response is not JSON (nonnumeric port: 'a'); check the address"),
        (f"{server.url}/classify", empty, f"{empty} has no rows to send; pass a file with rows"),
        (f"{server.url}/classify", number, f"{number} line 1: a row needs a list of `answers` or "
         "one of chosen, rejected, completion, completions"),
    ):  # fmt: skip
        assert refused(capsys, "--check", url, str(rewards), data) == reason
