"""How the ranks of a launcher find each other."""

import os
from datetime import timedelta

from torch import distributed

from rlhf.errors import RLHFError, SameOnAllRanks, first_line

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launcher_variables() -> list[str]:
    """Return the launcher's variables of the rendezvous. Raises RLHFError for half of them."""
    present = [name for name in RENDEZVOUS if name in os.environ]
    if not distributed.is_initialized() and len(present) not in (0, len(RENDEZVOUS)):
        missing = ", ".join(name for name in RENDEZVOUS if name not in os.environ)
        raise RLHFError(
            f"the launcher set {', '.join(present)} but not {missing}; start the ranks with "
            "torchrun, or unset them to run one process"
        )
    for name in present:
        if name != "MASTER_ADDR" and not os.environ[name].isdecimal():
            value = os.environ[name]
            raise RLHFError(f"the launcher set {name} to {value!r}, which is not a number")
    return present


def meet(timeout: timedelta) -> distributed.Store:
    """Return the store of the launcher's rendezvous, once every rank has connected to it. Raises
    RLHFError that names the ranks that did not come."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun keeps the store itself.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = distributed.TCPStore(
            address, port, world, rank == 0 and not agent, timeout, wait_for_workers=False
        )
    except (ValueError, distributed.DistNetworkError, distributed.DistStoreError) as error:
        raise RLHFError(
            f"rank {rank} cannot connect to rank 0 at {address}:{port} ({first_line(error)}); "
            f"check MASTER_ADDR and MASTER_PORT, or raise deepspeed.timeout"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    names = [f"attempt {attempt}, rank {other}" for other in range(world)]
    store.set(names[rank], "here")
    try:
        _wait(store, names, timeout)
    except distributed.DistNetworkError as error:
        raise SameOnAllRanks("rank 0 ended before all ranks had connected") from error
    return distributed.PrefixStore(f"attempt {attempt}", store)


def _wait(store: distributed.TCPStore, names: list[str], timeout: timedelta) -> None:
    try:
        store.wait(names, timeout)
    except distributed.DistStoreError as error:
        missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
        raise RLHFError(
            f"{len(missing)} of {len(names)} ranks did not connect to {store.host}:{store.port} "
            f"within {timeout.total_seconds() / 60:g} minutes: {', '.join(missing)}; see their "
            "output, or raise deepspeed.timeout"
        ) from error
