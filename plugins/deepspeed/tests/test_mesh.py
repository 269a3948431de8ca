"""The axes of a mesh and their process groups."""

from datetime import timedelta

import pytest
import torch
from plans import config
from torch import distributed

from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.testing.ranks import ranks_fixture
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


def test_sequence_and_tensor_axes_are_refused_together():
    with pytest.raises(RLHFError) as error:
        axis_sizes(config(sequence_parallel=2, tensor_parallel=2), 4)
    assert str(error.value) == (
        "deepspeed.sequence_parallel cannot be combined with deepspeed.tensor_parallel; set one "
        "of the two to 1"
    )
    sizes = axis_sizes(config(sequence_parallel=4), 4)
    assert sizes == {"data": 1, "sequence": 4, "tensor": 1}
