"""ARCHITECTURE.md and CONTRIBUTING.md name what exists, the first one every room of the core."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core/src/rlhf"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
BOTH = PAGE + (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to add other things")[2]
PATHS = sorted(set(re.findall(r"`([\w./-]+(?:/|\.(?:py|md|html|jinja|yml)))`", BOTH)))
NAMES = sorted(set(re.findall(r"`((?:[A-Za-z_]\w*\.)?[A-Za-z_]\w*)`", BOTH)) - {*PATHS, "PS", "DK"})

TESTS = [ROOT / "tests", ROOT / "core/tests", *sorted(ROOT.glob("plugins/*/tests"))]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_on_the_page_exists(path: str) -> None:
    path = path.replace("PS/", "plugins/deepspeed/src/rlhf_plugin_deepspeed/")
    path = path.replace("DK/", "plugins/devkit/src/rlhf_devkit/")
    assert any((folder / path).exists() for folder in (ROOT, CORE)), path


def test_every_name_on_the_page_exists() -> None:
    places = (CORE, ROOT / "core/tests", *ROOT.glob("plugins/*/src"))
    text = "".join(path.read_text() for place in places for path in place.rglob("*.py"))
    words = set(re.findall(r"\w+", text))
    assert [name for name in NAMES if name.split(".")[-1] not in words] == []
    assert {"TENSOR_FAMILIES", "patch_stage_3"} <= {*NAMES}


def test_every_room_of_the_core_is_on_the_page() -> None:
    rooms = {path.name + "/" for path in CORE.iterdir() if (path / "__init__.py").exists()}
    files = {path.name for path in CORE.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert rooms | files <= set(PATHS)


def test_tests_of_the_core_lie_in_the_room_that_they_test() -> None:
    tests = ROOT / "core/tests"
    folders = {path.relative_to(tests).parent.as_posix() for path in tests.rglob("test_*.py")}
    assert [name for name in folders if not (CORE / name).is_dir()] == []
    # Of a public file.
    top = {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
    assert [name for name in top if not (CORE / f"{name}.py").is_file()] == []


@pytest.mark.parametrize("tests", TESTS, ids=lambda path: path.parent.name)
def test_no_two_files_of_tests_have_the_same_name(tests: Path) -> None:
    names = [path.name for path in tests.rglob("test_*.py")]
    assert sorted(names) == sorted({*names})


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) <= 1450


def test_every_file_of_the_backend_is_in_its_readme() -> None:
    folder = ROOT / "plugins/deepspeed"
    files = {path.name for path in folder.glob("src/*/*.py")} - {"__init__.py"}
    named = {*re.findall(r"`(\w+\.py)`", (folder / "README.md").read_text())}
    assert files <= named
