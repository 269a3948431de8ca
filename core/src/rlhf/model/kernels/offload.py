"""Recomputation with layer inputs in host memory: for any number of layers, the accelerator holds
the activations of one layer and the inputs of two.

A separate stream copies inputs to the host while their layer computes, and back while the layer
above it runs backward. A copy that is shorter than a layer costs no time.
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
        """Return `layer(*inputs)`, which backward computes again from inputs on the host."""
        last = self._last()
        if last is not None:
            last.release()
        self._layer = Layer(last)
        with saved_tensors_hooks(self.pack, self.unpack):
            output = checkpoint(layer, *inputs, use_reentrant=False)
        self._last = weakref.ref(self._layer)
        # Its saved inputs hold the layer as long as the graph exists.
        self._layer = None
        return output

    def pack(self, hidden: Tensor) -> Any:
        """Return what to keep of an input of the running layer."""
        if not hidden.numel():
            return hidden  # torch's checkpoint adds an empty tensor to the inputs.
        if hidden.device.type == "meta":
            return hidden.shape, hidden.dtype
        if self._stream is None:
            self._stream = torch.get_device_module(hidden.device).Stream()
        assert self._layer is not None
        return Kept(hidden.detach(), self._layer, self._stream)

    def unpack(self, kept: Any) -> Tensor:
        """Return the input, and start to fetch those of the layer that comes next in backward."""
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
    """The inputs of one layer's forward."""

    def __init__(self, before: "Layer | None") -> None:
        self.before: Callable[[], Layer | None] = (
            _nothing if before is None else weakref.ref(before)
        )
        """The layer that ran before this one, so its inputs are needed next in backward."""
        self.kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    def release(self) -> None:
        """Release the inputs' device memory."""
        for kept in self.kept:
            kept.release()

    def fetch(self) -> None:
        """Start to copy all inputs to the device."""
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
        """The input on the device, or None; it may still be on its way."""
        pinned = hidden.device.type != "cpu"
        self.host = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=pinned)
        self._copy(self.host, hidden)

    def release(self) -> None:
        """Release the device memory once the copy to the host is done."""
        self.streams.current_stream().wait_event(self.copied)
        self.here = None

    def fetch(self) -> None:
        """Start to copy the input to the device, unless it is there."""
        if self.here is None:
            self.here = torch.empty_like(self.host, device=self.device, pin_memory=False)
            if self.device.type != "cpu":
                # If it is never taken, its memory must not be reused before the copy ends.
                self.here.record_stream(self.stream)
            self._copy(self.here, self.host)

    def take(self) -> Tensor:
        """Return the input on the device and stop holding it."""
        self.fetch()
        self.streams.current_stream().wait_event(self.copied)
        hidden, self.here = self.here, None
        assert hidden is not None
        return hidden

    def _copy(self, target: Tensor, source: Tensor) -> None:
        # Earlier work on the device may still compute the source, or use the target's memory.
        self.stream.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.stream):
            target.copy_(source, non_blocking=True)
            self.copied = self.stream.record_event()


def _nothing() -> None:
    return None
