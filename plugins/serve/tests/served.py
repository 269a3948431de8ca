"""A real `rlhf serve` process, what asks it, and the models that it serves."""

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import field, frozen
from transformers import LlamaConfig

from rlhf_devkit import short_run, tiny
from rlhf_devkit.forked import Forked

TOKEN = "a-token"
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
ANSWERS = ["The answer is 4.", "5", "It is 4, since 2 + 2 = 4."]


@frozen
class Response:
    """The answer to a request."""

    status: int
    body: Any
    headers: dict[str, str] = field(factory=dict, repr=False)

    @property
    def refusal(self) -> tuple[int, str]:
        """Status and reason of a request that was refused."""
        return self.status, self.body["error"]


@frozen
class Served:
    """A server process."""

    url: str
    process: Forked
    printed: str
    """What it printed before it answered."""

    def post(self, path: str, body: Any, *, authorization: str | None = None) -> Response:
        """Send JSON, or bytes as they are, with the token unless `authorization` is given."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        value = f"Bearer {TOKEN}" if authorization is None else authorization
        return self._ask(path, data, {"Content-Type": "application/json", "Authorization": value})

    def get(self, path: str, *, authorization: str = f"Bearer {TOKEN}") -> Response:
        """Ask for a page."""
        return self._ask(path, None, {"Authorization": authorization})

    def metric(self, name: str) -> float:
        """Return the number of a line of `/metrics`."""
        lines = self.get("/metrics").body.splitlines()
        return next((float(x.split()[-1]) for x in lines if x.startswith(f"{name} ")), 0.0)

    def _ask(self, path: str, data: bytes | None, headers: dict[str, str]) -> Response:
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return _response(answer.status, answer.read(), answer.headers)
        except urllib.error.HTTPError as error:
            return _response(error.code, error.read(), error.headers)


def _response(status: int, body: bytes, headers: Any) -> Response:
    text = body.decode()
    is_json = "json" in headers.get("Content-Type", "")
    return Response(status, json.loads(text) if is_json else text, dict(headers))


@contextmanager
def serving(model: Path | str, *words: str, folder: Path | None = None) -> Iterator[Served]:
    """Serve a model, which may be relative to `folder`, on a free port until the block ends."""
    command = ["-m", "rlhf", "serve", str(model), *words, "--port", "0"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = Forked(*command, environment=env, folder=folder)
    printed = ""
    while "serving" not in printed:
        line = process.stdout.readline()
        assert line, f"the server ended: {process.communicate()}: {printed}"
        printed += line
    found = re.search(r"^serving +(http://\S+)$", printed, re.MULTILINE)
    assert found is not None
    try:
        yield Served(found[1], process, printed)
    finally:
        process.terminate()
        process.communicate(30)


def train(trainer: str, format: str, folder: Path) -> Path:
    """Train a tiny model, whose tokenizer adds BOS, for four steps; return its run folder."""
    folder.mkdir(exist_ok=True)
    words = short_run(folder, format)
    model, run = folder / "model", folder / "run"
    config = LlamaConfig.from_pretrained(model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (bos,) = (it for it in tokenizer["added_tokens"] if it["id"] == config.bos_token_id)
    start = {"SpecialToken": {"id": bos["content"], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [start, text], "pair": [start, text],
        "special_tokens": {
            bos["content"]: {
                "id": bos["content"], "ids": [bos["id"]], "tokens": [bos["content"]],
            },
        },
    }  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    tiny.run(trainer, [*words, "--output", str(run)], str(folder / "cache"), True)
    return run


def score(*answers: Any, prompt: Any = QUESTION) -> dict[str, Any]:
    """Return the body of a request to `/v1/score`."""
    return {"items": [{"prompt": prompt, "answers": list(answers)}]}
