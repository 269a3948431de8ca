"""What `make dist` builds is what users install."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest
from hatchling.builders.sdist import SdistBuilder

from wheel_sites import PROJECTS, ROOT, build


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_dist", ROOT / ".ci" / "check_dist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    for wheel in build(tmp_path_factory.mktemp("wheels")).values():
        shutil.copy(wheel, folder)
    for project in PROJECTS:
        list(SdistBuilder(str(project)).build(directory=str(folder)))
    return folder


def test_every_distribution_has_what_its_users_see(check: ModuleType, dist: Path) -> None:
    assert list(check.problems(dist)) == []


def test_a_stray_file_and_a_missing_distribution_are_found(
    check: ModuleType, dist: Path, tmp_path: Path
) -> None:
    for path in dist.iterdir():
        shutil.copy(path, tmp_path)
    (wheel,) = tmp_path.glob("rlhf_core-*.whl")
    with ZipFile(wheel, "a") as packed:
        packed.writestr("notes.txt", "")
    (gone,) = tmp_path.glob("rlhf_plugin_dpo-*.tar.gz")
    gone.unlink()
    assert list(check.problems(tmp_path)) == [
        f"{wheel.name}: stray notes.txt",
        f"{gone.name} is missing",
    ]


def test_every_distribution_has_the_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert [project.name for project in PROJECTS if (project / "LICENSE").read_text() != text] == []
