"""The paper index, the troubleshooting page and that of runs say what is in the sources."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rlhf.folder.run_folder import MAY_CHANGE

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in (ROOT / "core" / "src", *ROOT.glob("plugins/*/src"))
    for path in sorted(folder.rglob("*.py"))
    if "templates" not in path.parts
]
PAPER = re.compile(r"arxiv\s+(\d{4}\.\d{5})", re.IGNORECASE)
VALUE = "\0"
"""What a message has in the place of a value."""


def rows(page: str) -> list[list[str]]:
    """Return the cells of each row of the tables of a page, without heads."""
    lines = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        row
        for row, below in zip(cells, [*cells[1:], [""]], strict=True)
        if "---" not in (row[0], below[0])
    ]


def papers(path: Path) -> set[str]:
    """Return the papers that a source names."""
    return set(PAPER.findall(path.read_text()))


def source(name: str) -> tuple[Path, str]:
    """Return the file of `package.module.NAME`, and NAME."""
    module, _, attribute = name.rpartition(".")
    ending = f"/src/{module.replace('.', '/')}.py"
    (path,) = (path for path in SOURCES if path.as_posix().endswith(ending))
    return path, attribute


@pytest.mark.parametrize("row", rows("papers.md"), ids=lambda row: row[0])
def test_a_method_is_where_the_paper_index_says(row: list[str]) -> None:
    _, paper, equation, code, _ = row
    files = []
    for name in re.findall(r"`([\w.]+)`", code):
        path, attribute = source(name)
        assert re.search(rf"^(def |class )?{attribute}\b", path.read_text(), re.MULTILINE), name
        files.append(path)
    (number,) = set(re.findall(r"\d{4}\.\d{5}", paper))
    naming = [path for path in files if number in papers(path)]
    assert naming, f"{files} do not name arXiv {number}"
    for part in re.findall(r"[\d.]*\d", equation):
        assert any(part in path.read_text() for path in naming), (number, equation)


def test_every_paper_of_the_sources_is_in_the_index() -> None:
    named = set().union(*map(papers, SOURCES))
    assert named == papers(ROOT / "docs" / "papers.md"), "add a row to docs/papers.md"


@cache
def messages() -> str:
    """Return the texts of all sources, one after the other."""
    trees = (ast.parse(path.read_text()) for path in SOURCES)
    return "\n".join(text for tree in trees for node in ast.walk(tree) for text in texts(node))


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the text of a string, with VALUE for what it is filled with."""
    match node:
        case ast.Constant(str(text)):
            yield text
        case ast.JoinedStr(parts):
            yield "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in parts)


QUOTED = [
    quote
    for seen, *_ in rows("troubleshooting.md")
    for quote in re.findall(r"`([^`]*)`", seen)
    if " " in quote
]


@pytest.mark.parametrize("quote", QUOTED)
def test_a_message_of_the_troubleshooting_page_is_in_the_sources(quote: str) -> None:
    parts = [re.escape(part) for part in quote.split("...")]
    assert re.search(r"[^\n]*".join(parts).replace(r"\ ", " "), messages()), quote


def test_a_third_of_the_rows_quotes_a_message() -> None:
    assert len(QUOTED) > len(rows("troubleshooting.md")) / 3


def test_what_a_resumed_run_may_change_is_on_the_page_of_runs() -> None:
    changes = " ".join(change for change, resumed, *_ in rows("runs.md") if resumed == "yes")
    assert [name for name in MAY_CHANGE if f"`{name}`" not in changes] == []
