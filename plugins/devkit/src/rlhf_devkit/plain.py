"""The plain backend: one process, plain torch, fp32, on the CPU."""

import os

from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.hookspecs import hookimpl
from rlhf.plugin import Config
from rlhf_backend_torch import TorchBackend, seed


class PlainBackend(TorchBackend):
    """All hooks without sharding, offload or ranks."""

    name = "plain"

    @hookimpl
    def setup_mesh(self, config: Config) -> Mesh:
        self.check_precision(config)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise RLHFError(f"the {self.name} backend runs in one process; pass --nproc 1")
        seed(config)
        return Mesh()
