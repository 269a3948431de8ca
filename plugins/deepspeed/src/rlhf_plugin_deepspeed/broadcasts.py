"""How weights that ZeRO 1 and 2 have updated come to the other ranks: while the next forward pass
runs. DeepSpeed's names are those of 0.19.0 to 0.19.8."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from attrs import frozen
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor, distributed, nn

from rlhf_plugin_deepspeed.leaves import decoder_layers

MIN_ELEMENTS = 25_000_000
"""Elements of a bucket of weights, at least: each collective takes time of its own."""

deepspeed_gather = stage_1_and_2.all_gather_dp_groups


def broadcast_beside_forward(optimizer: Any, model: nn.Module) -> "WeightBroadcast":
    """Have `optimizer`, DeepSpeed's over `model`, send what it updates while `model` runs."""
    weights = WeightBroadcast(optimizer, model)
    own = optimizer.step

    def step(*arguments: Any, **options: Any) -> None:
        # A function of DeepSpeed's module, called by name.
        stage_1_and_2.all_gather_dp_groups = weights.broadcast
        try:
            own(*arguments, **options)
        finally:
            stage_1_and_2.all_gather_dp_groups = deepspeed_gather

    optimizer.step = step
    return weights


@frozen
class Bucket:
    """Weights that are sent together."""

    shards: list[tuple[Tensor, int, Any]]
    """Weights that lie side by side, the rank that has updated them, and its group."""
    sent: Any
    """An event behind the last of them, None where the host waits for each."""


class WeightBroadcast:
    """Sends the weights that ranks have updated, in the order in which forward reads them.

    DeepSpeed gathers them before a step ends, all shards side by side, so that no layer is whole
    before all are. Here what is outside of layers comes first, then layer after layer, each from
    the rank that has it, and forward waits before each layer for its own weights.
    """

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        accelerator = get_accelerator()
        self._stream = None if accelerator.is_synchronized_device() else accelerator.Stream()
        layers = decoder_layers(model)
        sizes = [flat.numel() for flat in optimizer.bit16_groups_flat]
        self._gathered = [index for index, size in enumerate(sizes) if size < MIN_ELEMENTS]
        """Groups of parameters that are gathered as a whole, before all buckets."""
        spans = _spans(optimizer, reading_order(model, layers), leave_out=self._gathered)
        self.buckets: list[Bucket] = []
        needed = []
        waiting: list[tuple[int, int, int]] = []
        last = len(layers) + 1
        for place in range(last + 1):
            waiting += spans.get(place, [])
            needed.append(len(self.buckets))
            if place in (0, last) or sum(end - start for _, start, end in waiting) >= MIN_ELEMENTS:
                sent = None if self._stream is None else accelerator.Event()
                self.buckets.append(Bucket(_shards(optimizer, waiting), sent))
                waiting = []
        # A head's product is computed outside of its module: the last layer waits for all weights,
        # and a model without layers at once.
        needed[len(layers)] = len(self.buckets) - 1
        for place, module in enumerate((model, *layers)):
            module.register_forward_pre_hook(self._wait_for(needed[place]))

    def broadcast(self, **groups: Any) -> None:
        """What takes the place of DeepSpeed's gathering in a step. Collective."""
        if self._stream is None:
            self._broadcast(groups)
            return
        accelerator = get_accelerator()
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            self._broadcast(groups)

    def wait(self) -> None:
        """Have the current stream wait for all of it: for whoever reads weights outside of a
        forward pass."""
        if self._stream is not None:
            get_accelerator().current_stream().wait_stream(self._stream)

    def _broadcast(self, groups: Mapping[str, Any]) -> None:
        by_group = ("groups_flat", "partitioned_param_groups", "dp_process_group")
        whole = {name: [groups[name][index] for index in self._gathered] for name in by_group}
        deepspeed_gather(**{**groups, **whole})
        for bucket in self.buckets:
            for weights, owner, group in bucket.shards:
                distributed.broadcast(weights, owner, group=group)
            if bucket.sent is not None:
                bucket.sent.record()

    def _wait_for(self, index: int) -> Any:
        sent = self.buckets[index].sent

        def wait(module: nn.Module, arguments: Any) -> None:
            if sent is not None:
                get_accelerator().current_stream().wait_event(sent)

        return wait


def reading_order(model: nn.Module, layers: list[nn.Module]) -> dict[nn.Parameter, int]:
    """When a forward pass first reads each parameter: 0 before the layers, 1 in the first of them,
    and so on; what the head alone has comes after the last."""
    places = {part: place for place, layer in enumerate(layers, 1) for part in layer.modules()}
    causal = getattr(model, "causal", None)
    head = causal.get_output_embeddings() if causal is not None else None
    if head is not None:
        places[head] = len(layers) + 1
    order: dict[nn.Parameter, int] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            place = places.get(part, 0)
            order[parameter] = min(place, order.get(parameter, place))
    return order


def _spans(
    optimizer: Any, order: Mapping[nn.Parameter, int], *, leave_out: list[int]
) -> dict[int, list[tuple[int, int, int]]]:
    """By place in the order: group, first element and end of each parameter in the group's flat
    weights."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for index, (flat, parameters) in enumerate(
        zip(optimizer.bit16_groups_flat, optimizer.bit16_groups, strict=True)
    ):
        if index in leave_out:
            continue
        for parameter in parameters:
            start = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
            spans.setdefault(order[parameter], []).append((index, start, start + parameter.numel()))
    return spans


def _shards(optimizer: Any, spans: list[tuple[int, int, int]]) -> list[tuple[Tensor, int, Any]]:
    """The weights of these spans, neighbours as one, cut where another rank's begin."""
    joined: list[tuple[int, int, int]] = []
    for index, start, end in sorted(spans):
        if joined and joined[-1][0] == index and joined[-1][2] == start:
            joined[-1] = (index, joined[-1][1], end)
        else:
            joined.append((index, start, end))
    shards = []
    for index, start, end in joined:
        flat, group = optimizer.bit16_groups_flat[index], optimizer.real_dp_process_group[index]
        each = flat.numel() // distributed.get_world_size(group)
        cuts = [start, *range((start // each + 1) * each, end, each), end]
        for begin, stop in pairwise(cuts):
            owner = distributed.get_global_rank(group, begin // each)
            shards.append((flat.data[begin:stop], owner, group))
    return shards
