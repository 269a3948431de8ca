"""Addresses of this machine, which are not reached through a proxy."""

import os
import socket
from ipaddress import ip_address

LOCAL = ("localhost", "127.0.0.1", "127.0.0.0/8", "::1", "0.0.0.0")
"""What `no_proxy` calls these addresses. Some libraries read names only, some networks too."""


def is_local_host(host: str) -> bool:
    """Return whether a host in a URL is this machine, by its name or a loopback address."""
    name = host.lower().partition("%")[0].rstrip(".")
    if name in ("localhost", *_own_names()) or name.endswith(".localhost"):
        return True
    try:
        # Also in forms such as 127.1. Without a look-up: a name server may be out of reach.
        found = socket.getaddrinfo(name, None, flags=socket.AI_NUMERICHOST)
        address = ip_address(found[0][4][0])
    except (OSError, ValueError):
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def bypass_proxies() -> None:
    """Add the addresses of this machine to `no_proxy`, which the libraries of observers and of the
    hub read, if the environment names a proxy."""
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in proxies):
        return
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if "*" not in names:
        names += [name for name in (*LOCAL, *_own_names()) if name not in names]
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(names)


def _own_names() -> list[str]:
    """Return the names of this machine, with and without a domain."""
    name = socket.gethostname().lower()
    return [each for each in dict.fromkeys((name, name.partition(".")[0])) if each]
