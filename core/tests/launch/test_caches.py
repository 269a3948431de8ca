"""What a run keeps on disk for later ones."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.errors import RLHFError
from rlhf.launch.caches import cache_root
from rlhf_devkit.forked import Forked

IMPORTS = """
from rlhf.launch.importing import importing
with importing():
    import torch
"""
OF_A_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch.child'])"


def start(site: Path, **variables: str) -> list[str]:
    """Import a package called torch from `site` as a run and its processes do; returns the
    bytecode in the cache."""
    (site / "torch").mkdir(parents=True, exist_ok=True)
    for name in ("__init__", "child"):
        (site / "torch" / f"{name}.py").touch()
    cache = site.parent / "cache"
    paths = {"PYTHONPATH": str(site), "RLHF_CACHE": str(cache), "PYTHONPYCACHEPREFIX": ""}
    environment = os.environ | paths | {"PYTHONDONTWRITEBYTECODE": ""} | variables
    subprocess.run([sys.executable, "-c", IMPORTS + OF_A_CHILD], env=environment, check=True)
    kept = (cache / "bytecode").rglob("torch/*.pyc")
    return sorted(path.name.split(".")[0] for path in kept)


def test_bytecode_that_is_written_nowhere_else_is_in_the_cache(tmp_path: Path) -> None:
    assert start(tmp_path / "site", PYTHONDONTWRITEBYTECODE="1") == ["__init__", "child"]
    assert not (tmp_path / "site" / "torch" / "__pycache__").exists()


def test_bytecode_beside_its_sources_is_used(tmp_path: Path) -> None:
    assert start(tmp_path / "site") == []
    assert (tmp_path / "site" / "torch" / "__pycache__").exists()
    assert start(tmp_path / "site", PYTHONDONTWRITEBYTECODE="1") == []


KERNELS = f"""{IMPORTS}
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(cache_dir())
"""
"""Prints where torch's compiler writes in a run."""


def own_environment(**variables: str) -> dict[str, str]:
    """Return the environment with these variables and without those of torch's compiler."""
    others = {name: value for name, value in os.environ.items() if "INDUCTOR" not in name}
    return others | variables


def test_compiled_kernels_are_in_the_cache_unless_the_user_says_where(tmp_path: Path) -> None:
    program, chosen = tmp_path / "program.py", tmp_path / "elsewhere"
    program.write_text(KERNELS)
    for variables, folder in (
        ({}, tmp_path / "kernels"),
        ({"TORCHINDUCTOR_CACHE_DIR": str(chosen)}, chosen),
    ):
        environment = own_environment(RLHF_CACHE=str(tmp_path), **variables)
        output, errors = Forked(str(program), environment=environment).communicate()
        assert (output, errors) == (f"{folder}\n", "")


def test_a_cache_that_cannot_be_written_does_not_hinder_imports(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = own_environment(RLHF_CACHE=str(tmp_path / "file"), TMPDIR=str(tmp_path))
    command = [sys.executable, "-c", KERNELS]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()).parent == tmp_path


def test_without_a_home_folder_the_error_names_rlhf_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "RLHF_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(RLHFError, match=r"no home folder; set RLHF_CACHE to a folder$"):
        cache_root()
