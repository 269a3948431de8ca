"""A local server of what `rlhf push` uses of a hub: repositories are created, files are uploaded
through LFS or in the commit."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from attrs import define, field

TOKEN = "a-token"


@define
class Hub:
    """The requests to the server, and what it holds."""

    url: str = ""
    refusal: tuple[int, str] | None = None
    """Status and text of the answer to the creation of a repository, instead of a repository."""
    private: bool = True
    """What it says of its repository."""
    created: list[dict[str, Any]] = field(factory=list)
    stored: dict[str, bytes] = field(factory=dict)
    """Contents of the LFS files by SHA-256."""
    files: dict[str, bytes] = field(factory=dict)
    """The files of the repository."""


class Handler(BaseHTTPRequestHandler):
    """Answers as a hub does, from the state in `server.hub`."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_POST(self) -> None:
        body = self.body()
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid token"})
        if self.path == "/api/repos/create":
            return self.create(json.loads(body))
        if self.path.endswith("/preupload/main"):
            return self.answer(200, {"files": [_mode(it) for it in json.loads(body)["files"]]})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [self.upload(it) for it in json.loads(body)["objects"]]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if self.path.endswith("/commit/main"):
            return self.commit([json.loads(line) for line in body.splitlines()])
        return self.answer(200, {"warnings": [], "errors": []})  # Of the card's YAML.

    def do_GET(self) -> None:
        hub = self.server.hub
        if hub.refusal is not None:
            return self.answer(404, {"error": "Repository not found"})
        name = self.path.removeprefix("/api/models/")
        return self.answer(200, {"id": name, "private": hub.private})

    def do_PUT(self) -> None:
        self.server.hub.stored[self.path.rsplit("/", 1)[1]] = self.body()
        self.answer(200, {})

    def create(self, wanted: dict[str, Any]) -> None:
        hub = self.server.hub
        if hub.refusal is not None:
            code, text = hub.refusal
            return self.answer(code, {"error": text})
        hub.created.append(wanted)
        name = f"{wanted['organization']}/{wanted['name']}"
        return self.answer(200, {"url": f"{hub.url}/{name}", "name": name})

    def upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        place = {"href": f"{self.server.hub.url}/stored/{wanted['oid']}", "header": {}}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": place}}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        hub = self.server.hub
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.files[value["path"]] = hub.stored[value["oid"]]
        self.answer(200, {"commitUrl": f"{hub.url}/me/model/commit/1", "commitOid": "1" * 40})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, code: int, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """A server on a free port of this machine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = Hub(url=f"http://127.0.0.1:{self.server_port}")


@contextmanager
def hub() -> Iterator[Hub]:
    """Serve a hub."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.hub
        finally:
            server.shutdown()
            thread.join()


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    large = file["path"].endswith(".safetensors")
    return {
        "path": file["path"],
        "uploadMode": "lfs" if large else "regular",
        "shouldIgnore": False,
    }
