"""Gateways of objects instead of installed plugins."""

from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType

from rlhf.registry.gateway import BackendGateway, build_backend, check_hooks
from rlhf.registry.observers import ObserverGateway


def build_gateways(
    backend: object,
    extensions: Iterable[object] = (),
    observers: Mapping[str, object] = MappingProxyType({}),
) -> tuple[BackendGateway, ObserverGateway]:
    """Return the gateways of these objects.

    The first extension is the outermost, the first observer is called first. Raises RLHFError for
    an implementation that pluggy would call wrongly or not at all.
    """
    for observer in observers.values():
        check_hooks("observer", observer)
    makers = {name: partial(_same, observer) for name, observer in observers.items()}
    return build_backend(backend, extensions), ObserverGateway(makers)


def _same(observer: object) -> object:
    return observer
