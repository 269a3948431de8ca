"""What a run keeps on disk for later ones."""

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rlhf.errors import RLHFError
from rlhf.launch.bytecode import sources
from rlhf.launch.caches import cache_root

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


WAITS = """
import sys, time
from pathlib import Path
while not list(Path(sys.argv[1]).rglob("torch/*/later.*.pyc")):
    time.sleep(0.01)
"""


def test_modules_without_bytecode_are_compiled_before_their_import(tmp_path: Path) -> None:
    library = tmp_path / "site" / "torch"
    for folder in ("nn", "testing", "nn/tests"):
        (library / folder).mkdir(parents=True)
        (library / folder / "later.py").touch()
    (library / "__init__.py").touch()
    paths = {"PYTHONPATH": str(library.parent), "RLHF_CACHE": str(tmp_path / "cache")}
    environment = os.environ | paths | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": ""}
    command = [sys.executable, "-c", IMPORTS + WAITS, str(tmp_path / "cache")]
    subprocess.run(command, env=environment, check=True, timeout=300)
    compiled = (tmp_path / "cache" / "bytecode").rglob("later.*.pyc")
    assert [path.parent.name for path in compiled] == ["nn"]


def test_compiling_ends_with_the_process_that_imports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf.launch.bytecode", str(os.getppid())]
    assert subprocess.run(command, timeout=300).returncode == -signal.SIGKILL
    words = "import time; from rlhf.launch import caches; caches.compile_beside(); time.sleep(60)"
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", words], env=environment) as run:
        wait_for(lambda: len(helpers_of(run.pid)) > 1)
        run.kill()
    wait_for(lambda: not helpers_of(run.pid))


def helpers_of(pid: int) -> list[Path]:
    """Return the processes that compile for another, which forks give the same command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_text().split("\0")
            if words[-4:] == ["-m", "rlhf.launch.bytecode", str(pid), ""]:
                found.append(process)
    return found


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_folder_of_tests_above_a_library_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "tests" / "a_library"
    (library / "tests").mkdir(parents=True)
    for file in (library / "__init__.py", library / "tests" / "skipped.py"):
        file.touch()
    monkeypatch.syspath_prepend(str(library.parent))
    assert sources("a_library") == [str(library / "__init__.py")]


def test_a_cache_with_bytecode_starts_no_helper(tmp_path: Path) -> None:
    site, cache = tmp_path / "site", tmp_path / "cache" / "bytecode"
    for _ in range(2):
        start(site, PYTHONDONTWRITEBYTECODE="1")
    words = "from rlhf.launch import caches; caches.compile_beside = print; caches.keep_compiled()"
    paths = {"PYTHONPATH": str(site), "RLHF_CACHE": str(cache.parent), "PYTHONPYCACHEPREFIX": ""}
    environment = os.environ | paths | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", words]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == ""
    next(cache.rglob("torch/__init__*.pyc")).unlink()
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "\n"


def kernels_of(**variables: str) -> Path:
    """Return where torch's compiler writes in a run with these variables."""
    others = {name: value for name, value in os.environ.items() if "INDUCTOR" not in name}
    words = f"{IMPORTS}\nfrom torch._inductor.runtime.cache_dir_utils import cache_dir\n"
    command = [sys.executable, "-c", f"{words}print(cache_dir())"]
    environment = others | variables
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


def test_compiled_kernels_are_in_the_cache_unless_the_user_says_where(tmp_path: Path) -> None:
    cache, chosen = str(tmp_path), str(tmp_path / "elsewhere")
    assert kernels_of(RLHF_CACHE=cache) == tmp_path / "kernels"
    assert kernels_of(RLHF_CACHE=cache, TORCHINDUCTOR_CACHE_DIR=chosen) == Path(chosen)


def test_a_cache_that_cannot_be_written_does_not_hinder_imports(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = kernels_of(RLHF_CACHE=str(tmp_path / "file"), TMPDIR=str(tmp_path))
    assert found.parent == tmp_path


def test_without_a_home_folder_the_error_names_rlhf_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "RLHF_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(RLHFError, match=r"no home folder; set RLHF_CACHE to a folder$"):
        cache_root()
