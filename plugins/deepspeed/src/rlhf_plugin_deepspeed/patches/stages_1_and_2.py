"""ZeRO 1 and 2: gradients summed in place and in one order, and bf16 states without masters."""

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed, nn

from rlhf.errors import RLHFError
from rlhf_plugin_deepspeed.patches.checks import check_once
from rlhf_plugin_deepspeed.patches.install import check_target, replace
from rlhf_plugin_deepspeed.plans import ZeroPlan


def patch_stages_1_and_2(
    optimizer: Any, model: nn.Module, plan: ZeroPlan
) -> "GradientOrder | None":
    """Patch DeepSpeed's optimizer; returns what reduces gradients, None where DeepSpeed still does,
    in line with backward."""
    if plan.stage not in (1, 2):
        return None
    if "no-master-copy" in plan.patches:
        update_weights_themselves(optimizer)
    check_once(optimizer, plan.patches)
    ordered = _side_by_side(optimizer) and (optimizer.overlap_comm or optimizer.cpu_offload)
    if optimizer.cpu_offload or not ordered:
        # Copies to the host would start on another stream. And during backward DeepSpeed reduces in
        # no fixed order, and at stage 1 loses the gradients that only earlier micro-batches have.
        replace("gradient-order", optimizer, overlap_comm=False)
    return GradientOrder(optimizer, model) if ordered else None


class GradientOrder:
    """Reduces the gradients of `optimizer`, DeepSpeed's over `model`, in one order: during
    backward, or in line with it where `optimizer` is on the CPU.

    DeepSpeed reduces gradients as they arrive. Ranks whose rows leave out a parameter then reduce
    different ones together, and stage 1 only reduces those of the step's last micro-batch. Here
    a gradient waits for those before it in a backward pass, as in DistributedDataParallel (arXiv
    2006.15704, section 3.2.3), and missing ones count as zeros at the end.
    """

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        self._optimizer = optimizer
        self.order = backward_order(optimizer, model)
        """Parameters with their group."""
        self._position = {parameter: place for place, (parameter, _) in enumerate(self.order)}
        self._arrived: set[nn.Parameter] = set()
        self._streams: set[Any] = set()
        """Streams on which gradients arrived."""
        self._next = 0
        self._reducing = False
        self._end = optimizer.independent_gradient_partition_epilogue
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
        """Take a parameter whose gradient has arrived. Raises RLHFError for one reduced before."""
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
        # DeepSpeed would wait for the device; what it reduces here is empty by now.
        beside, optimizer.overlap_comm = optimizer.overlap_comm, False
        self._end()
        optimizer.overlap_comm = beside

    def _sum(self, tensor: Tensor, communication_data_type: torch.dtype) -> None:
        """Sum a bucket's gradients [elements], where DeepSpeed averages them. Collective."""
        optimizer = self._optimizer
        bucket = optimizer.ipg_buckets[communication_data_type]
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
            distributed.all_reduce(tensor, group=optimizer.dp_process_group)


def backward_order(optimizer: Any, model: nn.Module) -> list[tuple[nn.Parameter, int]]:
    """Return the trained parameters with their group in about the order in which a backward pass
    reaches them, the reverse of that of their modules; norms and biases come last, together."""
    group_of = {
        parameter: group
        for group, members in enumerate(optimizer.bit16_groups)
        for parameter in members
    }
    parameters = [item for item in reversed([*model.parameters()]) if item in group_of]
    parameters.sort(key=lambda parameter: parameter.ndim < 2)
    return [(parameter, group_of[parameter]) for parameter in parameters]


def _side_by_side(optimizer: Any) -> bool:
    """Return whether gradients lie side by side in buckets of their dtype and add up in it."""
    dtype = optimizer.dtype
    own = optimizer.gradient_accumulation_dtype == dtype and [*optimizer.ipg_buckets] == [dtype]
    return optimizer.contiguous_gradients and own and not getattr(optimizer, "zenflow", False)


def update_weights_themselves(optimizer: Any) -> None:
    """Let the optimizer of stages 1 and 2 update the weights themselves. DeepSpeed gives it a copy
    of this rank's, which only masters in a higher precision need."""
    name = check_target("no-master-copy", optimizer, "single_partition_of_fp32_groups")
    masters = getattr(optimizer, name)
    for index, parts in enumerate(optimizer.parallel_partitioned_bit16_groups):
        rank = distributed.get_rank(group=optimizer.real_dp_process_group[index])
        assert masters[index].dtype == parts[rank].dtype
        masters[index].data = parts[rank].data
    # Rebuilt, because it holds views of the copy.
    optimizer._link_all_hp_params()
    without_padding = optimizer._get_groups_without_padding
    # torch saves a view with all of the tensor behind it.
    replace(
        "no-master-copy",
        optimizer,
        _get_groups_without_padding=lambda groups_with_padding: [
            item.clone() for item in without_padding(groups_with_padding)
        ],
    )
