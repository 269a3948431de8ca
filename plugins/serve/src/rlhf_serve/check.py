"""`rlhf serve --check`: rows are sent to a server, and its scores compared with the folder's own,
which are computed one answer at a time as in plain transformers."""

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf.cli import is_local_host
from rlhf.errors import RLHFError, counted, first_line
from rlhf.formats import errors_at
from rlhf.preview import DataEntry, Source
from rlhf.scorer import Scorer
from rlhf_rows import adds_bos, with_our_columns

ROWS = 64
"""Rows that are sent: the first of the data."""
ALLOWED = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Largest difference by the dtype of the folder; of scores above 1 as a share of them."""
SECONDS = 120
"""Time in which the server has to answer."""
ANSWERS = ("chosen", "rejected", "completion", "completions")
"""Columns of the row formats that hold one answer."""
Exchange = tuple[dict[str, Any], Callable[[Any], Any]]
"""The body of a request, and what returns the scores in its response."""


def check_server(url: str, scorer: Scorer, data: str, token: str | None) -> int:
    """Send the rows of `data` and print the largest difference; return 0 if it is small, else 1."""
    try:
        path = urlsplit(url).path
    except ValueError as error:
        raise RLHFError(f"--check {url} is not a URL: {first_line(error)}") from error
    if path not in CLIENTS:
        raise RLHFError(f"--check {url} must end with one of {', '.join(CLIENTS)}")
    if scorer.task != "sequence" and path != "/v1/score":
        raise RLHFError(f"{scorer.folder} scores the steps of an answer; check it at /v1/score")
    scores, worst, note = 0, 0.0, ""
    items = list(islice(read_items(data, scorer), ROWS))
    if not items:
        raise RLHFError(f"{data} has no rows to send; pass a file with rows")
    for where, prompt, answers in items:
        with errors_at(where):
            logits = scorer.read(prompt, answers, max_tokens=1)
        is_raw = path == "/classify"
        ours = flat([each.tolist() if is_raw else scorer.scores(each) for each in logits])
        theirs = [
            score
            for body, read in CLIENTS[path](prompt, answers, scorer)
            for score in flat(scores_in(post(url, body, token, where), read, url))
        ]
        if len(ours) != len(theirs):
            raise RLHFError(f"{where}: {url} returned {len(theirs)} scores instead of {len(ours)}")
        scores += len(ours)
        for one, other in zip(ours, theirs, strict=True):
            difference = abs(one - other) / max(1.0, abs(one))
            if not difference <= worst:
                worst, note = difference, f", at {where}: {one:.6g} here, {other:.6g} there"
    allowed = ALLOWED[scorer.precision]
    compared = f"{counted(scores, 'score')} of {counted(len(items), 'row')}"
    print(f"{compared}, largest difference {worst:.1e}{note}")
    agrees = worst <= allowed
    verb = "agrees" if agrees else "does not agree"
    print(f"{url} {verb} with {scorer.folder} (allowed: {allowed:g})")
    return 0 if agrees else 1


def read_items(data: str, scorer: Scorer) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield place, prompt and answers of each row of a file."""
    format = "preference" if scorer.task == "sequence" else "stepwise"
    source = Source(DataEntry(path=data), "eval", format)
    with tempfile.TemporaryDirectory() as scratch:
        rows = source.read(Path(scratch))
        for number in range(len(rows)):
            where, row = source.row(rows[number], number)
            with errors_at(where):
                ours = with_our_columns(row)
            yield (where, *prompt_and_answers(where, ours))


def prompt_and_answers(where: str, row: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Return the prompt of a row, empty if it has none, and its answers."""
    answers = row.get("answers") or [row[name] for name in ANSWERS if row.get(name) is not None]
    if not answers or not isinstance(answers, list):
        raise RLHFError(f"{where}: a row needs a list of `answers` or one of {', '.join(ANSWERS)}")
    empty = "" if isinstance(answers[0], str) else []
    return row.get("prompt") or empty, answers


def score(prompt: Any, answers: list[Any], scorer: Scorer) -> Iterator[Exchange]:
    items = [{"prompt": prompt, "answers": answers}]
    yield {"items": items}, lambda response: response["items"][0]["scores"]


def get_reward(prompt: Any, answers: list[Any], scorer: Scorer) -> Iterator[Exchange]:
    texts = [whole_text(prompt, answer, scorer) for answer in answers]
    prompts = [json.dumps(prompt)] * len(texts)
    body = {"query": texts, "prompts": prompts, "labels": [None] * len(texts)}
    yield body, lambda response: response["rewards"]


def classify(prompt: Any, answers: list[Any], scorer: Scorer) -> Iterator[Exchange]:
    for answer in answers:
        body: dict[str, Any] = {"use_activation": False, "add_special_tokens": False}
        if isinstance(prompt, str) and isinstance(answer, str):
            body["input"] = whole_text(prompt, answer, scorer)
        else:
            body["messages"] = conversation(prompt, answer)
        yield body, lambda response: [each["probs"] for each in response["data"]]


CLIENTS: dict[str, Callable[[Any, list[Any], Scorer], Iterator[Exchange]]] = {
    "/v1/score": score, "/get_reward": get_reward, "/classify": classify,
}  # fmt: skip
"""What is sent for a row, by the path of the URL."""


def whole_text(prompt: Any, answer: Any, scorer: Scorer) -> str:
    """Return a prompt with its answer as the model sees it, with all special tokens."""
    tokenizer = scorer.tokenizer
    if not isinstance(prompt, str) or not isinstance(answer, str):
        return str(tokenizer.apply_chat_template(conversation(prompt, answer), tokenize=False))
    start = tokenizer.bos_token if adds_bos(tokenizer) else ""
    return f"{start}{prompt}{answer}{tokenizer.eos_token or ''}"


def conversation(prompt: Any, answer: Any) -> list[Any]:
    """Return the messages of a prompt and an answer, of which one may be text."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    return [*before, *after]


def post(url: str, body: Mapping[str, Any], token: str | None, where: str) -> Any:
    """Return the JSON of the response."""
    headers = {"Content-Type": "application/json"}
    headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    # Without handlers of its own, it takes the proxies of the environment.
    own = [urllib.request.ProxyHandler({})] if is_local_host(urlsplit(url).hostname or "") else []
    try:
        with urllib.request.build_opener(*own).open(request, timeout=SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        reason = " ".join(error.read().decode(errors="replace").split())[:300]
        raise RLHFError(f"{where}: {url} answered {error.code}: {reason}") from error
    except (OSError, ValueError, HTTPException) as error:
        raise RLHFError(
            f"cannot reach {url}, or its response is not JSON ({first_line(error)}); check the "
            "address"
        ) from error


def scores_in(response: Any, read: Callable[[Any], Any], url: str) -> Any:
    try:
        return read(response)
    except (LookupError, TypeError):
        shown = json.dumps(response)[:200]
        raise RLHFError(
            f"{url} returned a response that does not have the form of its path: {shown}; check "
            "the path"
        ) from None


def flat(value: Any) -> list[float]:
    """Return the numbers in nested lists."""
    return [each for item in value for each in flat(item)] if isinstance(value, list) else [value]
