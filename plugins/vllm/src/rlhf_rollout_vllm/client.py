"""Requests to the server, by HTTP, with JSON in both directions."""

import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from rlhf.errors import RLHFError

PAUSES = (1.0, 4.0, 16.0)
"""Seconds before each further attempt."""
IDLE = 2.0
"""Seconds after which a connection is not used again: the server closes it after 5."""
QUOTED = 300
"""Characters of a response that an error quotes."""
ENDING = 15.0
"""Seconds in which a server that does not answer may end: vLLM answers 500 for a while before."""


class NoAnswer(RLHFError):
    """The server could not be reached, or could not answer this time."""


class ServerEnded(RLHFError):
    """The process of a server that the run has started has ended."""


class Client:
    """A connection to the server for each thread that calls it."""

    def __init__(self, url: str, *, seconds: float, explain: Callable[[float], str | None]) -> None:
        """Requests may take `seconds`. `explain` returns why the server has ended, if it has; it
        waits so many seconds for the end."""
        address = urlsplit(url)
        self.url = url.rstrip("/")
        self._host, self._port = address.hostname or "", address.port or 80
        self._seconds, self._explain = seconds, explain
        self._local = threading.local()
        self._connections: set[http.client.HTTPConnection] = set()
        self._aborted = threading.Event()

    def get(self, path: str, *, once: bool = False) -> Any:
        """Return the JSON of the response to GET, as `post` does."""
        return self._repeated("GET", path, None, pauses=() if once else PAUSES)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, once: bool = False) -> Any:
        """Return the JSON of the response to POST. Unless `once`, a server that does not answer, or
        answers with a status of 500 or more, is asked again."""
        return self._repeated("POST", path, body, pauses=() if once else PAUSES)

    def abort(self) -> None:
        """End the requests of all threads with an error. The client is of no use afterwards."""
        self._aborted.set()
        for connection in [*self._connections]:
            if (sock := connection.sock) is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections, while no thread sends a request. They open again."""
        while self._connections:
            self._connections.pop().close()

    def _repeated(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        pauses: tuple[float, ...] = PAUSES,
    ) -> Any:
        end, waits = time.monotonic() + self._seconds, iter(pauses)
        while True:
            try:
                return self._exchange(method, path, body, seconds=end - time.monotonic())
            except NoAnswer as error:
                pause = next(waits, math.inf)
                is_last = time.monotonic() + pause > end
                if ended := self._explain(ENDING if is_last else 0.0):
                    raise ServerEnded(ended) from None
                if is_last or self._aborted.wait(pause):
                    raise RLHFError(str(error)) from None

    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, seconds: float
    ) -> Any:
        """Return the JSON of the response to one request."""
        where, started = f"{self.url}{path.partition('?')[0]}", time.monotonic()
        try:
            status, text = self._send(method, path, body, max(0.01, seconds))
        except TimeoutError:
            raise RLHFError(
                f"{where} did not answer within {time.monotonic() - started:.3g} s; look at the "
                "output of the server, or raise rollouts.vllm.seconds"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise NoAnswer(
                f"{where} does not answer ({reason}); look at the output of the server"
            ) from None
        quoted = " ".join(text.split())[:QUOTED]
        if status == 404 and "not found" in quoted.lower() and "model" not in quoted:
            raise RLHFError(
                f"{self.url} has no route {path.partition('?')[0]}; start vLLM as docs/vllm.md says"
            )
        if status >= 400:
            kind = NoAnswer if status >= 500 else RLHFError
            raise kind(f"{where} answered {status}: {quoted}; look at the output of the server")
        try:
            # Some routes answer with text, or with nothing.
            return json.loads(text) if path in JSON_ROUTES else text
        except ValueError:
            raise RLHFError(
                f"{where} returned a response that is not JSON: {quoted!r}; is this a vLLM server?"
            ) from None

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> tuple[int, str]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(self._host, self._port)
            self._local.connection, self._local.used = connection, time.monotonic()
        elif time.monotonic() - self._local.used > IDLE:
            connection.close()  # It opens again.
        connection.timeout = seconds
        self._connections.add(connection)
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
        try:
            if connection.sock is None:
                connection.connect()
            # Only now: `abort` sees no connection that is not open yet.
            if self._aborted.is_set():
                raise ConnectionAbortedError("another request has failed")
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            self._local.used = time.monotonic()
            return response.status, text
        except BaseException:
            connection.close()  # Half of a response may be left in it; it opens again.
            raise


GENERATE = "/inference/v1/generate"
MODELS = "/v1/models"
VERSION = "/weight_info"
RESET = "/reset_prefix_cache"
JSON_ROUTES = frozenset({GENERATE, MODELS, VERSION, RESET})
"""Routes whose response is read."""
