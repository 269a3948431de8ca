"""The micro-batches of a run, packed ahead of the step by threads.

A thread is enough, since packing is copying in numpy, which does not hold the interpreter's lock.
With a worker process, steps of a 0.5B model with micro-batches of 4,096 tokens, whose speed the
host bounds, take 1.05 to 1.2 times as long (benchmarks/NOTES.md).
"""

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor
from torchdata.nodes import IterableWrapper, ParallelMapper

from rlhf.data.batch import PackedBatch, map_tensors
from rlhf.data.layout import Rows
from rlhf.data.order import RunOrder, SurveyRows

CPU = torch.device("cpu")
NO_STATE_EVERY = 1 << 30
"""Only the plan says where a run is, so the nodes never take a snapshot of their own state."""


def batches_from(
    order: RunOrder,
    *,
    first_step: int = 0,
    workers: int = 0,
    device: torch.device = CPU,
) -> Iterator[PackedBatch]:
    """Return this rank's packed micro-batches from `first_step` on, without end, on the host.

    `workers` threads pack ahead, two micro-batches each; with 0, each is packed when it is asked
    for. What a thread raises is raised here. For an accelerator as `device`, tensors are in
    page-locked memory.
    """
    keys = order.micro_batches(count(first_step))

    def packed(key: Rows | SurveyRows) -> PackedBatch:
        batch = order[key]
        if device.type == "cpu":
            return batch
        # A new thread has the first device as its current one, on which it would open a context.
        torch.accelerator.set_device_index(device)
        return map_tensors(batch, Tensor.pin_memory)

    if not workers:
        return map(packed, keys)
    return iter(
        ParallelMapper(
            IterableWrapper(keys), packed, num_workers=workers, snapshot_frequency=NO_STATE_EVERY
        )
    )
