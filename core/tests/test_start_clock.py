"""The start of a run: its clock, its imports, and what is collected."""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers  # noqa: F401

from rlhf.engine import Mesh
from rlhf.launch import importing as imports
from rlhf.launch.garbage import without_collections
from rlhf.launch.importing import Distributions, importing, opening_device
from rlhf.launch.startup import Startup
from rlhf.train.rank import process_group


def test_the_time_of_a_part_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    startup = Startup()
    with startup.part("loading"), startup.part("probe"):
        pass
    startup.enter("first step")
    startup.enter("steps")
    assert startup.seconds == {"set-up": 17.0, "loading": 10.0, "probe": 4.0, "first step": 32.0}


def test_only_the_first_import_of_transformers_excludes_objects_from_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.unfreeze()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not gc.get_freeze_count()
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with importing():
        pass
    assert gc.isenabled()
    assert gc.get_freeze_count()
    gc.unfreeze()


def test_the_device_is_opened_beside_the_imports_and_its_errors_appear_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, imported, calls = threading.Event(), threading.Event(), []

    def initialise(flags: int) -> None:
        calls.append("driver")

    def library(name: str) -> Any:
        began.set()
        assert imported.wait(10)
        return SimpleNamespace(cuInit=initialise)

    def device(index: int) -> None:
        calls.append("device")
        raise RuntimeError(f"no device {index}")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(imports, "CDLL", library)
    monkeypatch.setattr(torch.cuda, "device", device)
    threads = threading.active_count()
    with opening_device():
        assert began.wait(10)
        imported.set()
    assert threading.active_count() == threads
    assert calls == ["driver", "device"]


def test_a_machine_without_a_driver_opens_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    calls: list[int] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(imports, "CDLL", library)
    monkeypatch.setattr(torch.cuda, "device", calls.append)
    with opening_device():
        pass
    assert not calls


def start(folder: Path, script: str) -> str:
    """Return what a script prints that finds packages in `folder` first."""
    found = os.pathsep.join([str(folder), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": found, "RLHF_CACHE": str(folder / "cache")},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


IMPORTS = """
import sys
opened = []
sys.addaudithook(lambda event, given: event == "open" and opened.append(str(given[0])))
from rlhf.launch.importing import importing_rank
with importing_rank():
    import rlhf.train.rank
assert not {"scipy", "sklearn", "torchao", "peft"} & {*sys.modules}, "imported"
assert sum(path.endswith("modeling_zoedepth.py") for path in opened) == 1, "read again"
from transformers import utils
for name in ("scipy", "sklearn", "torchao"):
    assert getattr(utils, f"is_{name}_available")(), f"{name} is taken for missing"
import scipy, sklearn, torchao
"""


def test_a_rank_imports_no_library_that_its_run_does_not_use(tmp_path: Path) -> None:
    for name in ("scipy", "sklearn", "torchao"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("__version__ = '99'\n")
    start(tmp_path, IMPORTS)


STAND_IN = {
    "__init__.py": """
from pathlib import Path
from transformers.utils import import_utils

names = import_utils.create_import_structure_from_path(Path(__file__).parent / "models")
from transformers import models
""",
    "utils/__init__.py": "",
    "utils/import_utils.py": """
from functools import lru_cache
from importlib import metadata
from pathlib import Path

PACKAGE_DISTRIBUTION_MAPPING = metadata.packages_distributions()
read = []

@lru_cache
def create_import_structure_from_path(module_path):
    folder = Path(module_path)
    read.append(folder.name)
    files = {file.stem: {file.read_text()} for file in folder.glob("[a-z]*.py")}
    below = {each.name: create_import_structure_from_path(each)
             for each in folder.iterdir() if each.is_dir() and each.name != "__pycache__"}
    return {frozenset({"torch"}): files} | below
""",
    "models/__init__.py": """
from transformers.utils import import_utils

names = import_utils.create_import_structure_from_path(__file__)
""",
    "models/llama/modeling_llama.py": "LlamaModel",
}
"""Files that read as much as those of transformers 5.17."""
READS_LESS = """
import json
import sys
from importlib import metadata

from rlhf.launch import importing

finders = [*sys.meta_path]
own, reads = metadata.packages_distributions, []
counted = metadata.packages_distributions = lambda: reads.append(1) or own()
importing._import_transformers()
assert metadata.packages_distributions is counted, "not restored"
assert sys.meta_path == finders, "not restored"
import transformers
from transformers.utils import import_utils
found = import_utils.PACKAGE_DISTRIBUTION_MAPPING
assert found["torch"] == ["torch"] and not reads, "read at once"
assert found["attr"] == ["attrs"] and reads == [1], "not read"
assert transformers.names == transformers.models.names
print(json.dumps([import_utils.read, str(transformers.names)]))
"""


READS_NOTHING = """
from rlhf.launch import importing
importing._import_transformers()
from transformers.utils import import_utils
assert not hasattr(import_utils, "create_import_structure_from_path"), "added"
"""


def test_transformers_reads_the_sources_of_its_models_once_for_all_runs(tmp_path: Path) -> None:
    for name, text in STAND_IN.items():
        file = tmp_path / "transformers" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    read, names = json.loads(start(tmp_path, READS_LESS))
    assert read == ["models", "llama"]
    of_torch = frozenset({"torch"})
    assert names == str({of_torch: {}, "llama": {of_torch: {"modeling_llama": {"LlamaModel"}}}})
    assert json.loads(start(tmp_path, READS_LESS)) == [[], names]
    source = tmp_path / "transformers" / "models" / "llama" / "modeling_llama.py"
    source.write_text("AnotherModel")
    read, changed = json.loads(start(tmp_path, READS_LESS))
    assert read == ["models", "llama"]
    assert changed == names.replace("LlamaModel", "AnotherModel") != names
    (kept,) = (tmp_path / "cache" / "names").iterdir()
    kept.write_bytes(kept.read_bytes()[:-10])
    assert json.loads(start(tmp_path, READS_LESS)) == [read, changed]
    assert json.loads(start(tmp_path, READS_LESS)) == [[], changed]
    # A cache that cannot be written.
    shutil.rmtree(kept.parent)
    kept.parent.touch()
    assert json.loads(start(tmp_path, READS_LESS)) == [read, changed]


def test_another_version_of_transformers_may_read_nothing(tmp_path: Path) -> None:
    package = tmp_path / "transformers" / "utils"
    package.mkdir(parents=True)
    for name in ("__init__.py", "import_utils.py"):
        (package / name).touch()
    (package.parent / "__init__.py").write_text("import transformers.utils.import_utils")
    start(tmp_path, READS_NOTHING)


def test_the_files_of_all_distributions_are_read_when_another_package_is_asked_for() -> None:
    reads = []

    def read() -> dict[str, list[str]]:
        reads.append(1)
        return {"attr": ["attrs"], "pytest": ["pytest", "another"], "torch": ["torch"]}

    found = Distributions(read)
    assert found["torch"] == found.get("torch") == ["torch"]
    assert not reads
    assert {**found} == read()
    assert found.get("no_package", []) == []
    assert len(found) == 3
    assert len(reads) == 2


def test_a_package_without_a_distribution_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "SAME_NAME", ("no_package",))
    assert Distributions(dict).get("no_package", []) == []


def test_collections_continue_after_a_failure() -> None:
    enabled: list[bool] = []

    @without_collections()
    def fail() -> None:
        enabled.append(gc.isenabled())
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert enabled == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class Model:
    """What an earlier run has left."""

    def __init__(self) -> None:
        self.itself = self


def test_models_of_an_earlier_run_leave_the_device_before_the_next_ones_are_loaded() -> None:
    hooks: Any = SimpleNamespace(
        setup_mesh=lambda config: Mesh(device=torch.device("cuda")),
        close_mesh=lambda mesh: True,
    )
    config: Any = None
    gc.disable()
    try:
        left = weakref.ref(Model())
        assert left() is not None
        with process_group(config, hooks):
            assert left() is None
    finally:
        gc.enable()
