"""Text files have one encoding in every locale."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
OPENERS = ("open", "fdopen", "TemporaryFile", "NamedTemporaryFile", "read_text", "write_text")
OTHERS = (
    "os.open", "table.open", "build_opener(*own).open", "TemporaryFile", "distribution.read_text",
    "reader.open", "Image.open", "images.open", "load_format(trainer.row_format).open",
    'load_format("demonstration").open',
)  # fmt: skip
"""Calls that open no text file, and one that has no argument for an encoding."""


def calls_in_the_encoding_of_the_locale(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of the calls that read or write text and name no encoding."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        words = {word.arg for word in call.keywords}
        modes = [ast.unparse(each) for each in call.args]
        opens = name.split(".")[-1] in OPENERS and not name.endswith(OTHERS)
        binary = any(mode in ("'rb'", "'wb'", "'ab'", "'r+b'") for mode in modes)
        process = name.startswith("subprocess.") and "text" in words
        if ((opens and not binary) or process) and "encoding" not in words:
            yield call.lineno, ast.unparse(call)


def test_each_call_that_opens_a_text_file_names_its_encoding() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {call}"
        for file in SOURCES
        for line, call in calls_in_the_encoding_of_the_locale(file.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_a_call_in_the_encoding_of_the_locale_is_found() -> None:
    source = """
path.read_text()
path.write_text(text)
path.open("a")
open(path)
subprocess.run(command, text=True)
path.open("rb")
path.read_text(encoding="utf-8")
os.open(path, os.O_RDONLY)
"""
    assert [line for line, _ in calls_in_the_encoding_of_the_locale(source)] == [2, 3, 4, 5, 6]


def test_a_traceback_in_any_language_is_written_in_any_locale(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom rlhf.folder.run_folder import write_error\n"
        "write_error(Path(sys.argv[1]), 'rank-0.txt', '\\u6570\\u636e \\udcff')"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, tmp_path], env=os.environ | ascii_only, check=True)
    text = (tmp_path / "errors" / "rank-0.txt").read_text(encoding="utf-8")
    assert text == "\u6570\u636e \\udcff"
