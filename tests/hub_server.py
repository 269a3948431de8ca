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


@contextmanager
def hub() -> Iterator[Hub]:
    """Serve a hub on a free port of this machine."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.body()
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                return self.answer(401, {"error": "Invalid token"})
            if self.path == "/api/repos/create":
                return self.create(json.loads(body))
            if self.path.endswith("/preupload/main"):
                return self.answer(200, {"files": [_mode(it) for it in json.loads(body)["files"]]})
            if self.path.endswith("/info/lfs/objects/batch"):
                objects = json.loads(body)["objects"]
                return self.answer(
                    200, {"transfer": "basic", "objects": list(map(_upload, objects))}
                )
            if self.path.endswith("/commit/main"):
                return self.commit([json.loads(line) for line in body.splitlines()])
            return self.answer(200, {"warnings": [], "errors": []})  # Of the card's YAML.

        def do_GET(self) -> None:
            if state.refusal is not None:
                return self.answer(404, {"error": "Repository not found"})
            return self.answer(
                200, {"id": self.path.removeprefix("/api/models/"), "private": state.private}
            )

        def do_PUT(self) -> None:
            state.stored[self.path.rsplit("/", 1)[1]] = self.body()
            self.answer(200, {})

        def create(self, wanted: dict[str, Any]) -> None:
            if state.refusal is not None:
                code, text = state.refusal
                return self.answer(code, {"error": text})
            state.created.append(wanted)
            name = f"{wanted['organization']}/{wanted['name']}"
            return self.answer(200, {"url": f"{state.url}/{name}", "name": name})

        def commit(self, lines: list[dict[str, Any]]) -> None:
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    state.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    state.files[value["path"]] = state.stored[value["oid"]]
            self.answer(200, {"commitUrl": f"{state.url}/me/model/commit/1", "commitOid": "1" * 40})

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

    def _upload(wanted: dict[str, Any]) -> dict[str, Any]:
        place = {"href": f"{state.url}/stored/{wanted['oid']}", "header": {}}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": place}}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    large = file["path"].endswith(".safetensors")
    return {
        "path": file["path"],
        "uploadMode": "lfs" if large else "regular",
        "shouldIgnore": False,
    }
