"""Gateways of objects instead of installed plugins."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from rlhf.registry.gateway import BackendGateway, as_makers, build_backend
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
    return build_backend(backend, extensions), ObserverGateway(as_makers(observers))
