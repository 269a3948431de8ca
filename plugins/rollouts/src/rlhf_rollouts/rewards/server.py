"""Scores from a server, as a reward function: see docs/serve.md for the form of the requests."""

import itertools
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from rlhf.cli import is_local_host
from rlhf.errors import RLHFError

PAUSES = (1.0, 4.0, 16.0)
"""Seconds before each further attempt."""
SHARE = 0.9
"""Share of a call's deadline in which the server has to answer, so that the error names it."""


class NoAnswer(RLHFError):
    """A server could not be reached, or could not answer this time."""


def server(
    prompts: Sequence[Any], completions: Sequence[Any], *, url: str, seconds: float, **columns: Any
) -> list[Any]:
    """Return the server's scores. Answers of the same prompt are sent together."""
    pairs = [*zip(prompts, completions, strict=True)]
    groups = [[*group] for _, group in itertools.groupby(pairs, lambda pair: pair[0])]
    items = [{"prompt": group[0][0], "answers": [pair[1] for pair in group]} for group in groups]
    response = post(url, {"items": items}, seconds=SHARE * seconds)
    try:
        return [score for item in response["items"] for score in item["scores"]]
    except (LookupError, TypeError):
        shown = json.dumps(response)[:200]
        raise RLHFError(
            f"{url} returned a response without items and scores: {shown}; check the address"
        ) from None


def post(url: str, body: Any, *, seconds: float, pauses: Sequence[float] = PAUSES) -> Any:
    """Return the JSON of the response. A server that does not answer, or that answers with a
    status of 500 or more, is asked again after each of `pauses`, within `seconds`."""
    end = time.monotonic() + seconds
    for pause in pauses:
        try:
            return exchange(url, body, seconds=max(0.1, end - time.monotonic()))
        except NoAnswer:
            if time.monotonic() + pause > end:
                raise
        time.sleep(pause)
    return exchange(url, body, seconds=max(0.1, end - time.monotonic()))


def exchange(url: str, body: Any, *, seconds: float) -> Any:
    """Return the JSON of the response to one request. Raises NoAnswer if a server may answer
    later."""
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get("RLHF_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        return json.loads(fetch(request, seconds))
    except urllib.error.HTTPError as error:
        reason = " ".join(error.read().decode(errors="replace").split())[:300]
        is_token = error.code == 401
        remedy = "set its token in RLHF_TOKEN" if is_token else "look at the output of the server"
        kind = NoAnswer if error.code >= 500 else RLHFError
        raise kind(f"{url} answered {error.code}: {reason}; {remedy}") from None
    except ValueError:
        raise RLHFError(f"{url} returned a response that is not JSON; check the address") from None


def reach(url: str, name: str, *, seconds: float = 10.0) -> None:
    """Raise RLHFError if the server of the reward `name` cannot be reached. Any response will
    do."""
    try:
        fetch(urllib.request.Request(url), seconds)
    except urllib.error.HTTPError:
        pass
    except NoAnswer as error:
        raise RLHFError(f"reward {name!r}: {error}") from None


def fetch(request: urllib.request.Request, seconds: float) -> bytes:
    """Return the body of the response to a request. Raises NoAnswer without one."""
    url = request.full_url
    # Without handlers of its own, it takes the proxies of the environment.
    local = is_local_host(urlsplit(url).hostname or "")
    own = [urllib.request.ProxyHandler({})] if local else []
    try:
        with urllib.request.build_opener(*own).open(request, timeout=seconds) as response:
            return bytes(response.read())
    except urllib.error.HTTPError:
        raise
    except (OSError, HTTPException) as error:
        # urllib puts the reason into an error of its own.
        reason = getattr(error, "reason", error)
        raise NoAnswer(
            f"{url} does not answer ({reason}); start the server, or correct the address"
        ) from None
