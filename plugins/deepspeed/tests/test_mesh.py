"""The axes of a mesh and their process groups."""

import gc
import time
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from plans import config
from torch import distributed

from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf_devkit.problem import Case, configure, follow, load, losses, make_batch
from rlhf_devkit.ranks import ranks_fixture
from rlhf_plugin_deepspeed import mesh as mesh_module
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig
from rlhf_plugin_deepspeed.mesh import axis_sizes, close_groups, with_groups

four = ranks_fixture(4)


def sums_along_axes():
    """The sums of the ranks' numbers along each axis, for three meshes one after the other."""
    rank, found = distributed.get_rank(), []
    for axis, size in (("sequence", 2), ("tensor", 2), ("sequence", 4)):
        sizes = axis_sizes(config(**{f"{axis}_parallel": size}), 4)
        places = with_groups(rank, sizes, timeout=timedelta(minutes=1))
        mesh = Mesh(rank=rank, world=4, **places)
        axes = (mesh.data, mesh.shards, mesh.sequence, mesh.tensor)
        found.append([int(axis.sum(torch.tensor(rank))) for axis in axes])
        close_groups(mesh)
    return found


def test_each_axis_has_the_group_of_the_ranks_that_differ_only_in_it(four):
    # data, shards, sequence, tensor
    assert four.run(sums_along_axes) == [
        [[0 + 2, 6, 0 + 1, 0], [0 + 2, 0 + 2, 0, 0 + 1], [0, 6, 6, 0]],
        [[1 + 3, 6, 0 + 1, 1], [1 + 3, 1 + 3, 1, 0 + 1], [1, 6, 6, 1]],
        [[0 + 2, 6, 2 + 3, 2], [0 + 2, 0 + 2, 2, 2 + 3], [2, 6, 6, 2]],
        [[1 + 3, 6, 2 + 3, 3], [1 + 3, 1 + 3, 3, 2 + 3], [3, 6, 6, 3]],
    ]


def test_sizes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(RLHFError) as error:
        axis_sizes(config(sequence_parallel=3), 4)
    assert str(error.value) == (
        "deepspeed.sequence_parallel is 3, which does not divide the number of ranks, 4; "
        "set it to 1 or 2 or 4"
    )


def test_more_ranks_than_devices_are_refused(monkeypatch):
    accelerator = SimpleNamespace(device_count=lambda: 2, device_name=lambda: "cuda")
    monkeypatch.setattr(mesh_module, "get_accelerator", lambda: accelerator)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert mesh_module._local_rank() == 1
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RLHFError) as error:
        mesh_module._local_rank()
    assert str(error.value) == (
        "LOCAL_RANK is 2 but this machine has 2 devices; start at most 2 ranks per machine"
    )


def test_an_axis_of_all_ranks_leaves_one_data_rank():
    sizes = axis_sizes(config(sequence_parallel=4), 4)
    assert sizes == {"data": 1, "sequence": 4, "tensor": 1}


def left_by_a_run(stage):
    """The threads of process groups that a run leaves, and whether its weights stay."""
    gc.collect()  # What an earlier test left.
    before = threads_of_groups()
    backend, case = DeepSpeedBackend(), Case(config=configure(DeepSpeedConfig(stage=stage)))
    _, engine, mesh = follow(backend, case)
    plan, frozen = load(backend, case, mesh, "teacher", trained=False)
    teacher = backend.prepare(
        model=frozen, optimizer=None, schedule=None, role="teacher", plan=plan, mesh=mesh
    )
    with torch.no_grad():
        teacher(make_batch(0, range(4), mesh.device), losses)
    weights = [weakref.ref(each.module) for each in (engine, teacher)]
    backend.close_mesh(mesh)
    del engine, teacher, frozen
    gc.collect()
    return threads_of_groups() - before, [each() is not None for each in weights]


def joined_before_another(marker):
    """Whether another rank, which takes its time, has made its groups when this one has joined."""
    own = mesh_module.with_groups

    def late(*args, **kwargs):
        made = own(*args, **kwargs)
        if distributed.get_rank() == 0:
            time.sleep(0.3)
            marker.touch()
        return made

    backend = DeepSpeedBackend()
    with patch.object(mesh_module, "with_groups", late):
        mesh = backend.setup_mesh(config())
    found = marker.exists()
    backend.close_mesh(mesh)
    return found


def test_no_rank_goes_on_before_all_have_joined(pair, tmp_path):
    """It may end at once, and would close connections that another one is still making."""
    assert pair.run(joined_before_another, tmp_path / "joined") == [True, True]


def threads_of_groups():
    """How many threads of this process wait for collectives."""
    threads = Path("/proc/self/task").iterdir()
    return sum("gloo" in (thread / "comm").read_text() for thread in threads)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_and_groups_of_a_run_end_with_it(pair, stage):
    assert pair.run(left_by_a_run, stage) == [(0, [False, False])] * 2
