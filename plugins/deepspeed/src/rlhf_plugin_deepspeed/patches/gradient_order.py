"""Gradients of ZeRO 1 and 2 summed over the ranks in place and in one order."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed, nn

from rlhf.errors import RLHFError
from rlhf_plugin_deepspeed.leaves import decoder_layers
from rlhf_plugin_deepspeed.patches.install import check_target, replace


def order_gradients(
    optimizer: Any, model: nn.Module, patches: Collection[str], *, to_owners: bool
) -> "GradientOrder | None":
    """Patch how `optimizer`, DeepSpeed's at stage 1 or 2, reduces and keeps gradients; None where
    DeepSpeed still reduces them, in line with backward."""
    fits = _side_by_side(optimizer)
    if optimizer.cpu_offload:
        # Copies to the host would start on another stream.
        replace("gradient-order", optimizer, overlap_comm=False)
    elif fits and "gradients-one-by-one" in patches:
        keep_one_by_one(optimizer)
    if fits and (optimizer.overlap_comm or optimizer.cpu_offload):
        return GradientOrder(optimizer, model, to_owners=to_owners)
    # DeepSpeed reduces beside backward in no fixed order, and at stage 1 loses the gradients that
    # only earlier micro-batches have.
    replace("gradient-order", optimizer, overlap_comm=False)
    return None


def keep_one_by_one(optimizer: Any) -> None:
    """Keep this rank's gradients one by one, each when it has been reduced. DeepSpeed allocates
    room for all of them with the first, beside the sums of earlier micro-batches and, during
    backward, the activations."""

    def copy_grads_in_partition(param: nn.Parameter, group_idx: int | None = None) -> None:
        gradient = optimizer.get_gradient_for_reduction(param)
        if param.numel() <= optimizer.reduce_bucket_size:
            gradient.data = gradient.clone()  # Its bucket is filled again.

    replace("gradients-one-by-one", optimizer, copy_grads_in_partition=copy_grads_in_partition)


class GradientOrder:
    """Reduces the gradients of `optimizer`, DeepSpeed's over `model`, in one order: during
    backward, or in line with it where `optimizer` is on the CPU.

    DeepSpeed reduces gradients as they arrive. Ranks whose rows leave out a parameter then reduce
    different ones together, and stage 1 only reduces those of the step's last micro-batch. Here
    the order is that of a backward pass, as in DistributedDataParallel (arXiv 2006.15704, section
    3.2.3): a gradient waits for those before it, and missing ones count as zeros at the end.
    DeepSpeed also divides by the ranks, reduces on all of them and copies each bucket; here a
    bucket's parts are summed in place, with `to_owners` each on the rank that updates its weights,
    else on all.
    """

    def __init__(self, optimizer: Any, model: nn.Module, *, to_owners: bool) -> None:
        self._optimizer = optimizer
        self._to_owners = to_owners
        self.order = backward_order(optimizer, model)
        """Parameters with their group."""
        self._position = {parameter: place for place, (parameter, _) in enumerate(self.order)}
        self._arrived: set[nn.Parameter] = set()
        self._streams: set[Any] = set()
        """Streams on which gradients arrived."""
        self._next = 0
        self._reducing = False
        self._end = optimizer.independent_gradient_partition_epilogue
        check_target("gradient-order", optimizer, "reduce_ipg_grads")
        replace(
            "gradient-order",
            optimizer,
            reduce_ready_partitions_and_remove_grads=self.arrive,
            average_tensor=self._sum,
            independent_gradient_partition_epilogue=self._finish,
        )

    @property
    def _stream(self) -> Any:
        """The stream that reduces; None for the one that computes."""
        return self._optimizer.reduction_stream if self._optimizer.overlap_comm else None

    def begin(self, *, last: bool) -> None:
        """Prepare for a backward pass: stage 1 reduces in the step's `last` only."""
        self._reducing = last or self._optimizer.partition_gradients
        self._arrived.clear()
        self._streams.clear()
        self._next = 0

    def arrive(self, param: nn.Parameter, i: int) -> None:
        """Take a parameter whose gradient has arrived. Raises RLHFError where it was reduced
        before."""
        # DeepSpeed's tiled products run a parameter several times and mark the last one.
        if not self._reducing or not getattr(param, "ds_grad_is_ready", True):
            return
        if self._position[param] < self._next:
            raise RLHFError(
                f"a gradient of shape {tuple(param.shape)} arrived again after it was reduced, as "
                "with torch.utils.checkpoint and use_reentrant=True; recompute with "
                "use_reentrant=False"
            )
        if self._optimizer.reduction_stream is not None:
            # The device has streams.
            self._streams.add(get_accelerator().current_stream())
        self._arrived.add(param)
        self._reduce_arrived()

    def _reduce_arrived(self) -> None:
        """Reduce in order up to the first gradient that has not arrived."""
        current = get_accelerator().current_stream()
        others = self._streams - {current}
        for stream in others:
            current.wait_stream(stream)
        while self._next < len(self.order) and self.order[self._next][0] in self._arrived:
            self._optimizer.reduce_independent_p_g_buckets_and_remove_grads(*self.order[self._next])
            self._next += 1
        for stream in others:
            # It may allocate the memory of a gradient that was copied into a bucket.
            stream.wait_stream(current)

    def _finish(self) -> None:
        """End a backward pass that reduces gradients. Collective."""
        optimizer = self._optimizer
        optimizer.setup_buckets()
        while self._next < len(self.order):
            parameter, _ = self.order[self._next]
            if optimizer.get_gradient_for_reduction(parameter) is None:
                parameter.grad = torch.zeros_like(parameter)
            self._arrived.add(parameter)
            self._reduce_arrived()
        optimizer.reduce_ipg_grads()
        if self._stream is not None:
            get_accelerator().current_stream().wait_stream(self._stream)
        with without_reductions(optimizer):
            self._end()

    def _sum(self, tensor: Tensor, communication_data_type: torch.dtype) -> None:
        """Sum a bucket's gradients [elements] over the ranks, where DeepSpeed averages them.
        Collective."""
        optimizer = self._optimizer
        bucket, group = optimizer.ipg_buckets[communication_data_type], optimizer.dp_process_group
        if not bucket.params:
            return
        accelerator, stream = get_accelerator(), self._stream
        if stream is not None:
            computing = accelerator.current_stream()
            for producer in {computing, *getattr(bucket, "copy_streams", ())}:
                stream.wait_stream(producer)
            # What is computed next may write where earlier buckets were read.
            computing.wait_stream(stream)
            if communication_data_type in optimizer.extra_large_param_to_reduce:
                # A gradient larger than a bucket is released once its part has been kept.
                tensor.record_stream(stream)
        with accelerator.stream(stream):
            if not self._to_owners:
                distributed.all_reduce(tensor, group=group)
                return
            for owner, start, end in owned_spans(optimizer, bucket.params):
                rank = distributed.get_global_rank(group, owner)
                distributed.reduce(tensor[start:end], rank, group=group)


@contextmanager
def without_reductions(optimizer: Any) -> Iterator[None]:
    """In this context DeepSpeed ends a backward pass without reducing and without waiting."""
    beside, optimizer.overlap_comm = optimizer.overlap_comm, False
    optimizer.reduce_ipg_grads = lambda comm_dtype=None: None
    try:
        yield
    finally:
        del optimizer.reduce_ipg_grads
        optimizer.overlap_comm = beside


def backward_order(optimizer: Any, model: nn.Module) -> list[tuple[nn.Parameter, int]]:
    """Return the trained parameters with their group in the order in which a backward pass reaches
    them; norms and biases of all layers come last, together."""
    places = forward_places(model)
    parameters = [
        (parameter, group)
        for group, members in enumerate(optimizer.bit16_groups)
        for parameter in members
        if parameter.requires_grad
    ]
    parameters.reverse()
    parameters.sort(key=lambda item: (item[0].ndim < 2, -places[item[0]]))
    return parameters


def forward_places(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return when a forward pass first reads each parameter: 0 before the layers, 1 in the first of
    them, and so on; what only the head has comes after the last."""
    layers = decoder_layers(model)
    place_of = {part: place for place, layer in enumerate(layers, 1) for part in layer.modules()}
    causal = getattr(model, "causal", None)
    head = causal.get_output_embeddings() if causal is not None else None
    if head is not None:
        place_of[head] = len(layers) + 1
    places: dict[nn.Parameter, int] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            place = place_of.get(part, 0)
            places[parameter] = min(place, places.get(parameter, place))
    return places


def owned_spans(
    optimizer: Any, parameters: list[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Return the elements of a bucket by the rank that updates their weights: rank, start, end.

    Two parameters of 6 and 4 elements, of which rank 0 owns the first 2: rank 0 has 0 to 2 and rank
    1 the rest of both, as one span, 2 to 10.
    """
    spans: list[tuple[int, int, int]] = []
    first = 0
    for group, index, number in parameters:
        offsets = optimizer.grad_start_offset[group]
        owners = optimizer.param_to_partition_ids[group][number]
        # DeepSpeed 0.19.0 holds offsets as floats.
        starts = sorted((int(offsets[owner][number]), owner) for owner in owners)
        size = optimizer.bit16_groups[group][index].numel()
        ends = [*(start for start, _ in starts[1:]), size]
        for (start, owner), end in zip(starts, ends, strict=True):
            begin = first + start
            if spans and spans[-1][0] == owner:
                _, begin, _ = spans.pop()
            spans.append((owner, begin, first + end))
        first += size
    return spans


def _side_by_side(optimizer: Any) -> bool:
    """Return whether `optimizer` lays gradients side by side in buckets of their own dtype and adds
    them up in it, as this module expects."""
    dtype = optimizer.dtype
    own = optimizer.gradient_accumulation_dtype == dtype and [*optimizer.ipg_buckets] == [dtype]
    return optimizer.contiguous_gradients and own and not getattr(optimizer, "zenflow", False)
