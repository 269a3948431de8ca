"""Recomputation whose kept inputs wait on the host: whatever the number of layers, an accelerator
holds the activations of one and the inputs of two.

Inputs leave on a stream of their own while their layer computes, and each comes back while the
layer above it runs backward: a copy that is shorter than a layer costs no time.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class HostInputs:
    """A checkpoint function for all layers of one model, in the order of their forward."""

    def __init__(self) -> None:
        self._layer: Layer | None = None
        self._last: Callable[[], Layer | None] = _nothing
        self._stream: Any = None

    def __call__(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """`layer(*inputs)`, computed again in backward from inputs that were on the host."""
        last = self._last()
        if last is not None:
            last.leave()
        self._layer = Layer(last)
        with saved_tensors_hooks(self.pack, self.unpack):
            output = checkpoint(layer, *inputs, use_reentrant=False)
        self._last = weakref.ref(self._layer)
        # What was kept of it holds the layer, as long as backward may come.
        self._layer = None
        return output

    def pack(self, hidden: Tensor) -> Any:
        """What is kept of an input of the layer that runs, of any shape."""
        if not hidden.numel():
            return hidden  # torch's checkpoint has a marker of its own among the inputs.
        if hidden.device.type == "meta":
            return hidden.shape, hidden.dtype
        if self._stream is None:
            self._stream = torch.get_device_module(hidden.device).Stream()
        assert self._layer is not None
        return Kept(hidden.detach(), self._layer, self._stream)

    def unpack(self, kept: Any) -> Tensor:
        """The input again; those that are wanted next are asked for."""
        if isinstance(kept, Tensor):
            return kept
        if isinstance(kept, tuple):
            shape, dtype = kept
            return torch.empty(shape, dtype=dtype, device="meta")
        hidden = kept.take()
        before = kept.layer.before()
        if before is not None:
            before.fetch()
        return hidden


class Layer:
    """The inputs that are kept of one layer's run."""

    def __init__(self, before: "Layer | None") -> None:
        self.before: Callable[[], Layer | None] = (
            _nothing if before is None else weakref.ref(before)
        )
        """The layer that ran before this one, whose inputs are wanted after its."""
        self.kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    def leave(self) -> None:
        """Give up the device's memory."""
        for kept in self.kept:
            kept.leave()

    def fetch(self) -> None:
        """Ask for all inputs on the device."""
        for kept in self.kept:
            kept.fetch()


class Kept:
    """One input between its layer's forward and backward."""

    def __init__(self, hidden: Tensor, layer: Layer, stream: Any) -> None:
        self.device = hidden.device
        self.streams = torch.get_device_module(hidden.device)
        self.stream = stream
        self.layer = layer
        layer.kept.add(self)
        self.here: Tensor | None = hidden
        """The input on the device, where it is there or on its way."""
        pinned = hidden.device.type != "cpu"
        self.host = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=pinned)
        self._copy(self.host, hidden)

    def leave(self) -> None:
        """Give up the device's memory, once the copy to the host is done."""
        self.streams.current_stream().wait_event(self.copied)
        self.here = None

    def fetch(self) -> None:
        """Ask for it on the device."""
        if self.here is None:
            self.here = torch.empty_like(self.host, device=self.device, pin_memory=False)
            if self.device.type != "cpu":
                # Should nobody take it, its memory is not used again before the copy ends.
                self.here.record_stream(self.stream)
            self._copy(self.here, self.host)

    def take(self) -> Tensor:
        """The input on the device, which this does not hold any longer."""
        self.fetch()
        self.streams.current_stream().wait_event(self.copied)
        hidden, self.here = self.here, None
        assert hidden is not None
        return hidden

    def _copy(self, target: Tensor, source: Tensor) -> None:
        # What the device has to do so far may be making the source, or using the target's memory.
        self.stream.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.stream):
            target.copy_(source, non_blocking=True)
            self.copied = self.stream.record_event()


def _nothing() -> None:
    return None
