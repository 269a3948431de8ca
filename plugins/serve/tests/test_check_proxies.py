"""`rlhf serve --check` reaches this machine without a proxy, and other hosts through it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from rlhf.errors import RLHFError
from rlhf_serve.check import post

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@contextmanager
def answering(text: str) -> Iterator[int]:
    """Answer every request on the port that is yielded with a text as JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f'"{text}"'.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without proxies, which is restored after the test."""
    for name in VARIABLES:
        for each in (name, name.upper()):
            monkeypatch.setenv(each, "")
            monkeypatch.delenv(each)
    return monkeypatch


@pytest.mark.parametrize("spelling", [str.lower, str.upper])
def test_a_check_reaches_this_machine_without_a_proxy(
    spelling: Callable[[str], str], environment: pytest.MonkeyPatch
) -> None:
    with answering("here") as port, answering("proxy") as proxy:
        environment.setenv(spelling("http_proxy"), f"http://127.0.0.1:{proxy}")
        for host in ("localhost", "LOCALHOST", "127.0.0.1", "127.0.0.2", "127.1", "0.0.0.0"):
            assert post(f"http://{host}:{port}/classify", {}, None, "row") == "here", host
        url = "http://rewards.invalid/classify"
        assert post(url, {}, None, "row") == "proxy"
        environment.setenv(spelling("no_proxy"), "invalid")
        with pytest.raises(RLHFError, match=f"^cannot reach {url}, or its response is not JSON"):
            post(url, {}, None, "row")
