"""How DeepSpeed's operators come to be there."""

import errno
import fcntl
import logging
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from torch.utils.file_baton import FileBaton

from rlhf_plugin_deepspeed import building
from rlhf_plugin_deepspeed.quiet import silenced


class Builder:
    """Takes its time."""

    name = "test_operator"

    def __init__(self, seconds):
        self.seconds = seconds

    def load(self, verbose):
        time.sleep(self.seconds)


TOLD = "compiling DeepSpeed's CPUAdam: a minute or two, once per machine\n"


@pytest.mark.parametrize(
    ("seconds", "local_rank", "printed"), [(0.3, "0", TOLD), (0.3, "1", ""), (0.0, "0", "")]
)
def test_a_long_build_is_printed_once_per_host(
    monkeypatch, capsys, tmp_path, seconds, local_rank, printed
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    accelerator = SimpleNamespace(create_op_builder=lambda name: Builder(seconds))
    monkeypatch.setattr(building, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(building, "SILENT_SECONDS", 0.1)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert building.compiled.__wrapped__("CPUAdamBuilder") == ""
    time.sleep(0.2)
    assert capsys.readouterr().err == printed


def test_a_killed_build_does_not_block_later_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    begun = f"""
import time
from torch.utils.file_baton import FileBaton
from rlhf_plugin_deepspeed import building
with building._one_build(building.Path({str(tmp_path)!r})):
    assert FileBaton({str(tmp_path / "lock")!r}).try_acquire()
    print("building", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", begun], stdout=subprocess.PIPE) as process:
        while b"building" not in process.stdout.readline():
            assert process.poll() is None
        process.kill()
    assert (tmp_path / "lock").exists()
    with building._one_build(tmp_path):
        assert FileBaton(str(tmp_path / "lock")).try_acquire()
    # After a build that has ended such a file is somebody else's.
    with building._one_build(tmp_path):
        assert (tmp_path / "lock").exists()


def test_a_file_system_without_locks_builds_all_the_same(monkeypatch, tmp_path):
    def refused(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with building._one_build(tmp_path):
        assert FileBaton(str(tmp_path / "lock")).try_acquire()


def test_a_build_during_a_run_does_not_end_its_silence(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    accelerator = SimpleNamespace(create_op_builder=lambda name: Builder(0.0))
    monkeypatch.setattr(building, "get_accelerator", lambda: accelerator)
    logger = logging.getLogger("DeepSpeed")
    warning = logger.makeRecord("DeepSpeed", logging.WARNING, __file__, 1, "careful", (), None)
    with silenced():
        assert building.compiled.__wrapped__("CPUAdamBuilder") == ""
        assert not logger.filter(warning)
    assert logger.filter(warning)
