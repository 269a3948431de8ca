"""The documentation builds as a site that needs no network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|img|iframe|source)[^>]* src=\S*//|<link[^>]* href=\S*//|@import")
"""What a browser loads from another address."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning: no broken link or anchor, no page outside of its menu."""
    folder = tmp_path_factory.mktemp("site")
    # With -q, mkdocs does not count warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_the_site_has_every_page_and_its_source(site: Path) -> None:
    pages = {path.stem for path in ROOT.glob("docs/*.md")}
    assert pages < {path.stem for path in site.glob("*.html")}
    for link in re.findall(r"\]\((.*?)\)", (site / "llms.txt").read_text()):
        assert (site / link).read_text().startswith("# "), link


def test_a_browser_loads_nothing_from_another_address(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not LOADED.search(path.read_text()), path.name
