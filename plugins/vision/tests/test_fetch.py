"""`rlhf fetch`, from a server on this machine."""

import base64
import http.server
import io
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlhf.cli import main
from rlhf_vision import fetch

ASKED: Counter[str] = Counter()


def picture() -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (4, 3), "red").save(data, "PNG")
    return data.getvalue()


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ASKED[self.path] += 1
        missing = "missing" in self.path
        failing = "busy" in self.path and ASKED[self.path] < 3
        self.send_response(404 if missing else 503 if failing else 200)
        self.end_headers()
        data = b"<html>" if "page" in self.path else picture()
        self.wfile.write(data[:-30] if "cut" in self.path else data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    ASKED.clear()
    monkeypatch.setattr(fetch, "WAIT", 0.0)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_rows_name_files_in_place_of_urls(address: str, tmp_path: Path, capsys: Any) -> None:
    one, two = f"{address}/one", f"{address}/busy.jpg?size=2"
    data = "data:;base64," + base64.b64encode(picture()).decode()
    asked = {"type": "text", "text": f"see {one}"}
    rows: list[dict[str, Any]] = [
        {"prompt": "<image> a", "completion": "b", "images": [one, "own.png"], "source": one},
        {"prompt": "<image> a", "completion": "b", "image": {"path": two}},
        {"messages": [
            {"role": "user", "content": [{"type": "image", "url": one}, asked]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": two}}]},
            {"role": "user", "content": [{"type": "image", "image": data}]},
        ]},
    ]  # fmt: skip
    rows.append({"messages": json.dumps(rows[2]["messages"]), "completion": '[{"a": 1}]'})
    folder = tmp_path / "out"
    command = ["fetch", write(tmp_path / "rows.jsonl", rows), str(folder)]
    assert main(command) == 0
    assert capsys.readouterr().out == f"wrote 4 rows and 2 images to {folder}\n"
    first, second, third, as_text = read(folder)
    assert as_text == {**rows[3], "messages": third["messages"]}
    path, other = first["images"][0], second["image"]["path"]
    own = str(tmp_path / "own.png")
    assert first == {**rows[0], "images": [path, own]}, "other columns stay"
    parts = [message["content"][0] for message in third["messages"]]
    assert parts[0] == {"type": "image", "url": path}
    assert parts[1] == {"type": "image_url", "image_url": {"url": other}}
    assert parts[2]["image"] == data
    assert third["messages"][0]["content"][1] == asked
    for each in {path, other}:
        assert (folder / each).read_bytes() == picture()
        assert each.endswith(".png")
    assert ASKED == {"/one": 1, "/busy.jpg?size=2": 3}
    # What is there is not downloaded again.
    assert main(command) == 0
    assert ASKED.total() == 4


def test_rows_that_do_not_exist_are_named(tmp_path: Path, capsys: Any) -> None:
    assert main(["fetch", "nothing.jsonl", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "error: no such file or folder: nothing.jsonl\n"


def test_what_cannot_be_downloaded_is_named(address: str, tmp_path: Path, capsys: Any) -> None:
    names = ("good", "missing", "page", "cut")
    rows = [{"prompt": "<image>", "images": [f"{address}/{name}"]} for name in names]
    folder = tmp_path / "out"
    command = ["fetch", write(tmp_path / "rows.jsonl", rows), str(folder)]
    assert main(command) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {address}/missing: HTTP Error 404: Not Found",
        f"error: {address}/page: it is not an image",
        f"error: {address}/cut: image file is truncated",
        "error: 3 images of 4 could not be downloaded; run the command again to try these once "
        "more, or with --drop to leave out their rows",
    ]
    assert not (folder / "rows.jsonl").exists()
    assert main([*command, "--drop"]) == 0
    assert capsys.readouterr().out == f"wrote 1 row (3 rows dropped) and 1 image to {folder}\n"
    assert [row["images"][0].rpartition(".")[2] for row in read(folder)] == ["png"]
    assert ASKED == {"/good": 1, "/missing": 2, "/page": 2, "/cut": 2}


def test_an_image_without_end_is_not_read(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(fetch, "MOST", 2**3)
    rows = [{"prompt": "<image>", "images": [f"{address}/large"]}]
    assert main(["fetch", write(tmp_path / "rows.jsonl", rows), str(tmp_path / "out")]) == 2
    assert "large: it has more than 0 MiB" in capsys.readouterr().err


def test_an_address_is_no_folder(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "<image>", "images": [f"{address}/good"]}]
    assert main(["fetch", write(tmp_path / "rows.jsonl", rows), "s3://bucket/rows"]) == 2
    assert capsys.readouterr().err.startswith("error: cannot write to s3://; choose a local path")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert not ASKED
