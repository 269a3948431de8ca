"""How gradients of ZeRO 1 and 2 are added up over the ranks, in place, in one order, and how each
rank keeps its own. DeepSpeed's names are those of 0.19.0 to 0.19.8."""

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed, nn

from rlhf.errors import RLHFError
from rlhf_plugin_deepspeed.broadcasts import reading_order
from rlhf_plugin_deepspeed.leaves import decoder_layers


def take_over_reduction(
    optimizer: Any, model: nn.Module, *, to_owners: bool
) -> "GradientReduction | None":
    """Have stages 1 and 2 reduce and keep gradients in our ways where those apply; None where
    DeepSpeed still reduces them."""
    ours = _side_by_side(optimizer)
    if optimizer.cpu_offload:
        # Copies to the host would start on a stream of their own.
        optimizer.overlap_comm = False
    elif ours:
        _keep_one_by_one(optimizer)
    if ours and (optimizer.overlap_comm or optimizer.cpu_offload):
        return GradientReduction(optimizer, model, to_owners=to_owners)
    # DeepSpeed's own way beside backward has no order, and at stage 1 it forgets what only earlier
    # micro-batches have a gradient for.
    optimizer.overlap_comm = False
    return None


def _side_by_side(optimizer: Any) -> bool:
    """Whether `optimizer`, DeepSpeed's for stage 1 or 2, lays gradients side by side in buckets of
    their own dtype and adds them up in it: what this module is for."""
    dtype = optimizer.dtype
    own = optimizer.gradient_accumulation_dtype == dtype and [*optimizer.ipg_buckets] == [dtype]
    return optimizer.contiguous_gradients and own and not getattr(optimizer, "zenflow", False)


def _keep_one_by_one(optimizer: Any) -> None:
    """Have `optimizer` keep this rank's gradients one by one, each when it has been reduced.
    DeepSpeed makes room for all of them with the first, beside those of earlier micro-batches and,
    where backward goes on, activations."""

    def keep(parameter: nn.Parameter, group: int | None = None) -> None:
        gradient = optimizer.get_gradient_for_reduction(parameter)
        if parameter.numel() <= optimizer.reduce_bucket_size:
            gradient.data = gradient.clone()  # Its bucket is filled again.

    optimizer.copy_grads_in_partition = keep


class GradientReduction:
    """Reduces the gradients of `optimizer`, DeepSpeed's over `model`, while backward goes on, or in
    line with it where `optimizer` is on the CPU.

    DeepSpeed does that in the order in which they come, so that ranks whose rows leave out a
    parameter reduce different ones together, and at stage 1 for those of the step's last
    micro-batch alone. Here the order is fixed, that of a backward pass, as in
    DistributedDataParallel (arXiv 2006.15704, section 3.2.3): a gradient waits for those before it,
    and what never came counts as zeros at the end. DeepSpeed also divides by the ranks, sums up on
    all of them and takes a copy of each bucket; here a bucket's parts are summed in place,
    `to_owners` each on the rank that updates its weights, else on all.
    """

    def __init__(self, optimizer: Any, model: nn.Module, *, to_owners: bool) -> None:
        self._optimizer = optimizer
        self._to_owners = to_owners
        places = reading_order(model, decoder_layers(model))
        parameters = [
            (parameter, group)
            for group, members in enumerate(optimizer.bit16_groups)
            for parameter in members
            if parameter.requires_grad
        ]
        # What is read last has its gradient first. Norms and biases of all layers go together.
        parameters.reverse()
        parameters.sort(key=lambda item: (item[0].ndim < 2, -places[item[0]]))
        self._order = parameters
        self._place = {parameter: place for place, (parameter, _) in enumerate(parameters)}
        self._came: set[nn.Parameter] = set()
        self._streams: set[Any] = set()
        """Those that gradients came on."""
        self._next = 0
        self._reducing = False
        self._end = optimizer.independent_gradient_partition_epilogue
        optimizer.reduce_ready_partitions_and_remove_grads = self._take
        optimizer.average_tensor = self._add_up
        optimizer.independent_gradient_partition_epilogue = self._finish

    @property
    def _stream(self) -> Any:
        """The one beside which gradients are reduced; None for the one that computes."""
        return self._optimizer.reduction_stream if self._optimizer.overlap_comm else None

    def begin(self, *, last: bool) -> None:
        """To be called before each backward pass: at stage 1 gradients are reduced in the step's
        last."""
        self._reducing = last or self._optimizer.partition_gradients
        self._came.clear()
        self._streams.clear()
        self._next = 0

    def _take(self, parameter: nn.Parameter, group: int) -> None:
        """In the place of DeepSpeed's, which a parameter's gradient comes to."""
        # DeepSpeed's tiled products run a parameter several times and say which is the last.
        if not self._reducing or not getattr(parameter, "ds_grad_is_ready", True):
            return
        if self._place[parameter] < self._next:
            raise RLHFError(
                f"a gradient of shape {tuple(parameter.shape)} came again after it was reduced, "
                "as where torch.utils.checkpoint runs a layer twice with use_reentrant=True: "
                "recompute with use_reentrant=False."
            )
        if self._optimizer.reduction_stream is not None:
            # The device has streams.
            self._streams.add(get_accelerator().current_stream())
        self._came.add(parameter)
        self._reduce_what_came()

    def _reduce_what_came(self) -> None:
        """All up to the first that has not."""
        current = get_accelerator().current_stream()
        others = self._streams - {current}
        for stream in others:
            current.wait_stream(stream)
        while self._next < len(self._order) and self._order[self._next][0] in self._came:
            self._optimizer.reduce_independent_p_g_buckets_and_remove_grads(
                *self._order[self._next]
            )
            self._next += 1
        for stream in others:
            # It gets the memory of what was copied into a bucket.
            stream.wait_stream(current)

    def _finish(self) -> None:
        """In the place of DeepSpeed's end of a backward pass, where gradients are reduced in it.
        Collective."""
        optimizer = self._optimizer
        optimizer.setup_buckets()
        while self._next < len(self._order):
            parameter, _ = self._order[self._next]
            if optimizer.get_gradient_for_reduction(parameter) is None:
                parameter.grad = torch.zeros_like(parameter)
            self._came.add(parameter)
            self._reduce_what_came()
        optimizer.reduce_ipg_grads()
        if self._stream is not None:
            get_accelerator().current_stream().wait_stream(self._stream)
        # Nothing is left to reduce, and nothing for the host to wait for.
        beside, optimizer.overlap_comm = optimizer.overlap_comm, False
        optimizer.reduce_ipg_grads = lambda: None
        try:
            self._end()
        finally:
            del optimizer.reduce_ipg_grads
            optimizer.overlap_comm = beside

    def _add_up(self, gradients: Tensor, dtype: torch.dtype) -> None:
        """In the place of DeepSpeed's average over the ranks: sum the [elements] `gradients` of a
        bucket. Collective."""
        optimizer = self._optimizer
        bucket, group = optimizer.ipg_buckets[dtype], optimizer.dp_process_group
        if not bucket.params:
            return
        accelerator, stream = get_accelerator(), self._stream
        if stream is not None:
            computing = accelerator.current_stream()
            for producer in {computing, *getattr(bucket, "copy_streams", ())}:
                stream.wait_stream(producer)
            # What is computed next may write where earlier buckets were read.
            computing.wait_stream(stream)
            if dtype in optimizer.extra_large_param_to_reduce:
                # A gradient by itself, given back as soon as its part is where it belongs.
                gradients.record_stream(stream)
        with accelerator.stream(stream):
            if not self._to_owners:
                distributed.all_reduce(gradients, group=group)
                return
            for owner, start, end in self._parts(bucket):
                rank = distributed.get_global_rank(group, owner)
                distributed.reduce(gradients[start:end], rank, group=group)

    def _parts(self, bucket: Any) -> list[tuple[int, int, int]]:
        """The bucket's elements by the rank that updates their weights: rank, first and end."""
        parts: list[tuple[int, int, int]] = []
        start = 0
        for group, index, number in bucket.params:
            offsets = self._optimizer.grad_start_offset[group]
            owners = self._optimizer.param_to_partition_ids[group][number]
            # DeepSpeed 0.19.0 has them in floats.
            cuts = sorted((int(offsets[owner][number]), owner) for owner in owners)
            size = self._optimizer.bit16_groups[group][index].numel()
            for (offset, owner), end in zip(
                cuts, [*(offset for offset, _ in cuts[1:]), size], strict=True
            ):
                begin = parts.pop()[1] if parts and parts[-1][0] == owner else start + offset
                parts.append((owner, begin, start + end))
            start += size
        return parts
