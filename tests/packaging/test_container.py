"""The Dockerfile: what it copies, installs and pins exists. The image itself is not built here."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from wheel_sites import ROOT

TEXT = (ROOT / "Dockerfile").read_text()


def test_every_folder_that_it_copies_or_installs_exists() -> None:
    copied = dict(re.findall(r"^COPY (\S+) (\S+)$", TEXT, re.MULTILINE))
    assert copied
    for source in copied:
        assert (ROOT / source).is_dir(), source
    installed = re.findall(r"^    /src/([\w/]+)(?:\[([\w,]+)\])?", TEXT, re.MULTILINE)
    assert len(installed) > 7
    for path, extras in installed:
        assert f"/src/{Path(path).parts[0]}" in copied.values()
        project = tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]
        known = project.get("optional-dependencies", {})
        assert set(filter(None, extras.split(","))) <= known.keys(), path


def test_its_torch_is_that_of_the_tests() -> None:
    (pinned,) = re.findall(r"torch==[\d.]+", TEXT)
    assert f"TORCH ?= {pinned}\n" in (ROOT / "Makefile").read_text()


def test_the_packages_of_the_system_exist() -> None:
    apt = shutil.which("apt-cache")
    if apt is None:
        pytest.skip("no apt here")
    (names,) = re.findall(r"--no-install-recommends (.+?) \\", TEXT)
    known = subprocess.run([apt, "pkgnames"], capture_output=True, text=True, check=True).stdout
    if not known.strip():
        pytest.skip("apt has no lists here")
    missing = set(names.split()) - set(known.split())
    assert not missing
