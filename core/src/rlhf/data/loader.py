"""The processes that pack a run's micro-batches ahead of the step."""

import gc
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any
from weakref import ref

import torch
from numpy.typing import NDArray
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from rlhf.data.batch import PackedBatch, map_tensors
from rlhf.data.order import RunOrder
from rlhf.launch.signals import die_with, numbers

NO_STATE_EVERY = 1 << 30
"""Only the plan says where a run is, so the loader never takes a snapshot of its own state."""
START_SECONDS = 60
"""How long a worker may take to answer its start. It takes milliseconds, unless its fork hung."""
START_ATTEMPTS = 3


def batches_from(
    order: RunOrder, *, first_step: int = 0, workers: int = 0, pin: bool = False
) -> Iterator[PackedBatch]:
    """Return this rank's packed micro-batches from `first_step` on, without end.

    `workers` processes pack ahead; if one dies, RuntimeError is raised here. `pin` puts the tensors
    into page-locked memory.
    """
    stopping = [signal.SIGTERM, *numbers(order.config.checkpoint.stop_signals)]
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which newer torch deprecates.
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        loader = StatefulDataLoader(
            order,
            batch_size=None,
            sampler=order.micro_batches(count(first_step)),
            num_workers=workers,
            # A worker sends arrays through a pipe, but each tensor in a segment of shared memory.
            collate_fn=lambda batch: map_tensors(batch, Tensor.numpy),
            # The loader draws a seed. From the default generator, that would change what a resumed
            # run draws.
            generator=torch.Generator().manual_seed(order.config.train.seed),
            worker_init_fn=partial(_init_worker, os.getpid(), stopping) if workers else None,
            # The rows are mapped into memory and no worker touches an accelerator, so a fork is
            # cheap and safe.
            multiprocessing_context="fork" if workers else None,
            snapshot_every_n_steps=NO_STATE_EVERY,
            timeout=START_SECONDS if workers else 0,
        )
        batches = _started(loader)
    # Only the start has a time limit: a slow batch is waited for.
    vars(batches)["_timeout"] = 0

    def as_tensor(array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if pin else tensor

    return (map_tensors(batch, as_tensor) for batch in batches)


def _started(loader: StatefulDataLoader[PackedBatch]) -> Iterator[PackedBatch]:
    """Start the workers, again if one does not answer: before CPython 3.11.10, a process hangs in
    its fork if another thread of its parent takes the interpreter's lock of thread states at that
    moment (github.com/python/cpython/issues/112275), as threads of collectives do."""
    others = multiprocessing.active_children()
    for attempt in range(START_ATTEMPTS):
        try:
            batches = iter(loader)
        except RuntimeError as error:
            if "timed out" not in str(error) or attempt + 1 == START_ATTEMPTS:
                raise
            # The loader has given up its workers by SIGTERM, which one that hangs in its fork
            # ignores.
            for worker in _since(others):
                worker.kill()
        else:
            break
    for worker in _since(others):
        # At its end, Python would send SIGTERM and wait, but a thread of a library may get it.
        Finalize(None, _kill, args=[ref(worker)], exitpriority=0)
    return batches


def _since(others: Sequence[BaseProcess]) -> list[BaseProcess]:
    return [process for process in multiprocessing.active_children() if process not in others]


def _kill(worker: ref[BaseProcess]) -> None:
    if process := worker():
        process.kill()


def _init_worker(parent: int, stopping: Sequence[int], worker: int) -> None:
    """End with the run, whose accelerator memory a fork would hold otherwise. Use one thread, and
    ignore Ctrl-C and the signals `stopping`, after which the run still finishes its step."""
    # What an earlier run has left cannot end in a fork, such as groups with threads.
    gc.freeze()
    die_with(parent)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in stopping:
        # A library may have a thread that does not block them.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    threading.Thread(target=_end_with_loader, args=[parent, stopping], daemon=True).start()


def _end_with_loader(parent: int, stopping: Sequence[int]) -> None:
    """End this worker when its parent sends a signal, as the loader does when it gives the worker
    up. The same signal from another process is for the run, whose processes may all get it."""
    while signal.sigwaitinfo(stopping).si_pid != parent:
        pass
    os._exit(0)
