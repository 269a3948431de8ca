"""`rlhf fetch`: the images that rows name by URL become files, and the rows name these."""

import base64
import hashlib
import http.client
import io
import json
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from rlhf.cli import check_path, write_file
from rlhf.errors import RLHFError, counted, first_line
from rlhf.preview import DataEntry, Source
from rlhf_vision.rows import VALUES, decoded, is_image

URL = re.compile(r"https?://\S+")
COLUMNS = ("image", "images")
TRIES, WAIT, TIMEOUT = 3, 1.0, 60.0
"""Of a download: how often it is tried, and seconds before the second time and for an answer."""
MOST = 2**28
"""Bytes of an image, above which it is not read further."""
SHOWN = 20
"""Failures of which each has a line."""


def fetch_command(data: str, output: str, *, workers: int, drop: bool) -> int:
    """Write `rows.jsonl` and the folder `images` into the folder `output`. Returns 0; 2 if an image
    could not be downloaded: then no rows are written, unless theirs are dropped. What is there is
    not downloaded again."""
    folder = Path(output)
    check_path(folder)
    with tempfile.TemporaryDirectory() as scratch:
        source = Source(DataEntry(path=data), "train", "raw")
        try:
            table = source.read(Path(scratch))
        except RLHFError as error:
            raise RLHFError(str(error).removeprefix("data.train: ")) from error
        rows = [source.row(columns, number)[1] for number, columns in enumerate(table, start=1)]
        (folder / "images").mkdir(parents=True, exist_ok=True)
        urls = dict.fromkeys(url for row in rows for url in urls_of(row))
        with ThreadPoolExecutor(workers) as pool:
            found = pool.map(lambda url: fetched(url, folder), urls)
            paths = dict(zip(urls, found, strict=True))
        failed = {url: problem for url, problem in paths.items() if isinstance(problem, RLHFError)}
        for problem in [*failed.values()][:SHOWN]:
            print(f"error: {problem}", file=sys.stderr)
        if failed and not drop:
            kinds = f"{counted(len(failed), 'image')} of {len(urls)}"
            raise RLHFError(
                f"{kinds} could not be downloaded; run the command again to try these once more, "
                "or with --drop to leave out their rows"
            )
        kept = [row for row in rows if not failed.keys() & urls_of(row)]

    def path(text: str) -> str:
        """Return a path as seen from the new rows."""
        whole = "://" in text or text.startswith("data:")
        return str(paths.get(text, text if whole else (source.folder / text).absolute()))

    lines = (json.dumps(changed(row, path), default=as_text) for row in kept)
    write_file(folder / "rows.jsonl", "".join(f"{line}\n" for line in lines), replace=True)
    dropped = f" ({counted(len(rows) - len(kept), 'row')} dropped)" if failed else ""
    counts = f"{counted(len(kept), 'row')}{dropped} and {counted(len(urls) - len(failed), 'image')}"
    print(f"wrote {counts} to {folder}")
    return 0


def urls_of(row: Mapping[str, Any]) -> set[str]:
    """Return the URLs of a row's images."""
    found: list[str] = []
    changed(row, found.append)
    return set(filter(URL.fullmatch, found))


def changed(row: Mapping[str, Any], change: Callable[[str], Any]) -> Any:
    """Return the row with `change(text)` in place of each image that is text, a URL or a path: in
    the columns of images, and in the parts of messages that are images, also of messages that are
    JSON text."""

    def images(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {key: images(it) if key in VALUES else it for key, it in value.items()}
        return list(map(images, value)) if isinstance(value, list) else value

    def parts(value: Any) -> Any:
        if isinstance(value, Mapping):
            if is_image(value):
                return images(value)
            return {key: parts(it) for key, it in value.items()}
        return list(map(parts, value)) if isinstance(value, list) else value

    def column(value: Any) -> Any:
        """Return a column; JSON text without images stays text."""
        talk = decoded(value)
        made = parts(talk)
        return value if made == talk else made

    return {name: images(it) if name in COLUMNS else column(it) for name, it in row.items()}


def fetched(url: str, folder: Path) -> str | RLHFError:
    """Return the path from `folder` of a downloaded image, or why there is none."""
    name = hashlib.sha256(url.encode()).hexdigest()[:32]
    for known in sorted((folder / "images").glob(f"{name}.*")):
        return known.relative_to(folder).as_posix()
    try:
        data = downloaded(url)
        picture = Image.open(io.BytesIO(data))
        picture.load()  # It is whole.
    except Exception as error:  # A damaged file may raise anything, and so may a server.
        reason = "it is not an image" if "cannot identify" in str(error) else first_line(error)
        return RLHFError(f"{url}: {reason}")
    path = folder / "images" / f"{name}.{str(picture.format).lower()}"
    part = path.with_name(f"part-{name}")  # A file that is cut short never has the name of one.
    part.write_bytes(data)
    part.rename(path)
    return path.relative_to(folder).as_posix()


def downloaded(url: str) -> bytes:
    """Return what a server answers. Raises what went wrong the last of `TRIES` times, or once with
    an answer that another try would not change."""
    request = urllib.request.Request(url, headers={"User-Agent": "rlhf-vision"})
    for number in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                data: bytes = answer.read(MOST + 1)
            if len(data) > MOST:
                raise RLHFError(f"it has more than {MOST // 2**20} MiB")
            return data
        except (OSError, http.client.HTTPException) as error:
            final = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if final or number + 1 == TRIES:
                raise
        time.sleep(WAIT * 2**number)
    raise AssertionError


def as_text(value: Any) -> Any:
    """Return bytes as a data URL, and what else JSON lacks as text."""
    if isinstance(value, bytes):
        return f"data:;base64,{base64.b64encode(value).decode()}"
    return list(value) if isinstance(value, Iterable) else str(value)
