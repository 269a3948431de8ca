"""The axes of a mesh, without processes: who is where, and which rows a rank gets; and what other
ranks do while rank 0 works."""

import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from torch import distributed

from rlhf.config.sections import BatchConfig, Config
from rlhf.data.example import Answer, Example
from rlhf.data.order import RunOrder
from rlhf.engine import Axis, Mesh, axes
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf_devkit.ranks import Ranks, ranks_fixture

two = ranks_fixture(2)


def test_neighbours_differ_in_tensor_then_in_sequence_then_in_data() -> None:
    places = [axes(rank, data=2, sequence=2, tensor=2) for rank in range(8)]
    assert [tuple(axis.rank for axis in place.values()) for place in places] == [
        (0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 1, 0), (0, 1, 1, 1),
        (1, 2, 0, 0), (1, 2, 0, 1), (1, 3, 1, 0), (1, 3, 1, 1),
    ]  # fmt: skip
    assert list(places[0]) == ["data", "shards", "sequence", "tensor"]


def test_all_ranks_are_data_ranks_by_default() -> None:
    mesh = Mesh(rank=3, world=4)
    assert mesh.data == mesh.shards == Axis(rank=3, size=4)
    assert mesh.sequence == mesh.tensor == Axis(rank=0, size=1)


class Rows(list[Example]):
    """Examples with what a layout needs of them."""

    def __init__(self) -> None:
        super().__init__(Example([9], [Answer([1] * (number + 1))]) for number in range(8))
        self.lengths = self.longest_path = np.array([number + 2 for number in range(8)])
        self.counts = {"answers": np.ones(8)}


def test_the_ranks_of_one_tensor_axis_get_the_same_rows() -> None:
    examples: Any = Rows()
    rows = []
    for rank in range(4):
        mesh = Mesh(rank=rank, world=4, **axes(rank, data=2, tensor=2))
        config = Config(batch=BatchConfig(size=8, tokens=16))
        order = RunOrder(
            examples=examples, config=config, rank=mesh.data.rank, ranks=mesh.data.size
        )
        rows.append([micro.tolist() for micro in order.step(0).micro])
    assert rows[0] == rows[1] != rows[2] == rows[3]
    assert sorted(row for rank in (0, 2) for micro in rows[rank] for row in micro) == [*range(8)]


def test_an_error_of_rank_zero_is_that_of_all_ranks() -> None:
    def refuse() -> None:
        error = RLHFError("no reward server")
        error.add_note("where")
        raise error

    with pytest.raises(SameOnAllRanks) as caught:
        Mesh().on_rank_zero(refuse)
    assert (str(caught.value), caught.value.__notes__) == ("no reward server", ["where"])


def work_for_long(timeout: float, seconds: float) -> tuple[list[str], str]:
    """Have rank 0 work for `seconds` twice, where a collective may take `timeout` seconds."""
    mesh = Mesh(rank=distributed.get_rank(), world=2)

    def act() -> str:
        time.sleep(seconds)
        return "judged"

    def refuse() -> None:
        time.sleep(seconds)
        raise RLHFError("no reward server")

    limit = distributed.distributed_c10d._set_pg_timeout
    mesh.barrier()
    limit(timedelta(seconds=timeout))
    try:
        results = [mesh.on_rank_zero(act), mesh.on_rank_zero(lambda: "written")]
        with pytest.raises(SameOnAllRanks) as caught:
            mesh.on_rank_zero(refuse)
    finally:
        limit(timedelta(minutes=10))
    return results, str(caught.value)


def test_rank_zero_may_work_longer_than_a_collective_may_take(two: Ranks) -> None:
    same = (["judged", "written"], "no reward server")
    assert two.run(work_for_long, 1.0, 2.5) == [same, same]
