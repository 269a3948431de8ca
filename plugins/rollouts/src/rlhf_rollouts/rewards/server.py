"""Scores from a server, as a reward function: see docs/serve.md for the form of the requests."""

import contextlib
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
from rlhf.errors import RLHFError, first_line

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
        with opened(request, seconds) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        reason = " ".join(error.read().decode(errors="replace").split())[:300]
        kind = NoAnswer if error.code >= 500 else RLHFError
        raise kind(
            f"{url} answered {error.code}: {reason}; look at the output of the server"
        ) from None
    except ValueError:
        raise RLHFError(f"{url} returned a response that is not JSON; check the address") from None


def reach(url: str, *, seconds: float = 10.0) -> None:
    """Raise NoAnswer for a server that cannot be reached. Any response will do."""
    with contextlib.suppress(urllib.error.HTTPError):
        opened(urllib.request.Request(url), seconds).close()


def opened(request: urllib.request.Request, seconds: float) -> Any:
    """Return the response to a request. Raises NoAnswer without one."""
    url = request.full_url
    # Without handlers of its own, it takes the proxies of the environment.
    local = is_local_host(urlsplit(url).hostname or "")
    handlers = [urllib.request.ProxyHandler({})] if local else []
    try:
        return urllib.request.build_opener(*handlers).open(request, timeout=seconds)
    except urllib.error.HTTPError:
        raise
    except (OSError, HTTPException) as error:
        raise NoAnswer(
            f"{url} does not answer ({first_line(error)}); start the server, or correct the address"
        ) from None
