"""Weights on their way from the trainer to the server: files that both see."""

import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, ClassVar

from attrs import define, field
from safetensors.torch import save_file
from torch import Tensor

from rlhf.engine import free_space
from rlhf.errors import RLHFError
from rlhf_rollout_vllm.client import RESET, VERSION, Client
from rlhf_rollout_vllm.threads import in_background

ATTEMPTS = 20
"""How often the server is asked to forget its prefixes: it may hold them for a moment."""
GB = 10**9


@define(eq=False)
class Transfer:
    """Brings weights to the server; only rank 0 has one. A subclass says how."""

    client: Client
    served: str
    """The name under which the server knows its model."""
    max_tokens: int
    """The server's limit on a prompt with its answer."""
    parent: str
    """The folder in which files are written."""
    number: int = 0
    """How often weights were sent."""
    # Another trainer of the same server has other names.
    run: str = field(factory=lambda: os.urandom(3).hex())
    folder: Path = field(init=False)
    remove: Callable[[], object] = field(init=False)
    """Removes the folder, which is also done when this object is collected."""

    def __attrs_post_init__(self) -> None:
        parent = Path(self.parent).absolute()
        remove_left_over(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{own_prefix()}{os.getpid()}-", dir=parent))
        self.remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    by_version: ClassVar[bool]
    """Whether answers tell the version of their weights; else their model's name does."""

    @property
    def version(self) -> str:
        """The name of the weights that were sent last."""
        return f"{self.run}-{self.number}"

    @property
    def model(self) -> str:
        """What a request names as its model."""
        return self.served

    def begin(self) -> None:
        """Prepare the server for new weights."""
        self.number += 1

    def put(self, bucket: Mapping[str, Tensor]) -> None:
        """Send some of the weights, by the names of an exported folder."""
        raise NotImplementedError

    def finish(self) -> None:
        """Let the server write answers with the new weights."""
        raise NotImplementedError

    def write(self, bucket: Mapping[str, Tensor], path: Path) -> None:
        """Write weights to a file."""
        size = sum(value.numel() * value.element_size() for value in bucket.values())
        if free_space(path.parent) < size:
            raise RLHFError(
                f"rollouts.vllm.folder {self.parent} has {free_space(path.parent) / GB:.3g} GB "
                f"left, and {size / GB:.3g} GB of weights are to be written there; make room, "
                "lower rollouts.vllm.bucket_gb, or choose another folder"
            )
        # Values may be views of one another, which a file cannot hold.
        save_file({name: value.to("cpu", copy=True).contiguous() for name, value in bucket.items()},
                  path)  # fmt: skip

    def forget_prefixes(self) -> None:
        """Let the server drop the keys and values of the old weights."""
        for _ in range(ATTEMPTS):
            response = self.client.post(RESET)
            if response == {"success": True}:
                return
            time.sleep(0.1)
        raise RLHFError(
            f"{self.client.url}{RESET} answered {response}: the server still uses what it has "
            "computed with old weights; end its other requests"
        )


def own_prefix() -> str:
    """Return how names of folders of weights begin, before the process id, which is one only among
    the processes that this one sees: containers may share a host's name and its memory."""
    return f"rlhf-vllm-{socket.gethostname()}-{Path('/proc/self/ns/pid').stat().st_ino}-"


def remove_left_over(parent: Path) -> None:
    """Remove the folders of weights whose process was killed."""
    for folder in parent.glob(f"{escape(own_prefix())}*"):
        process = folder.name.removeprefix(own_prefix()).partition("-")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)


@define(eq=False)
class WholeWeights(Transfer):
    """All weights, in buckets: the server loads one while the next is gathered."""

    by_version = True
    _loading: Future[Any] | None = field(default=None, init=False)
    _buckets: int = field(default=0, init=False)

    def begin(self) -> None:
        super().begin()
        if self.number == 1:
            self.client.post("/init_weight_transfer_engine", {"init_info": {}}, once=True)
        self.client.post("/pause?mode=keep", once=True)
        self.client.post("/start_weight_update", once=True)

    def put(self, bucket: Mapping[str, Tensor]) -> None:
        # The server may still read the file before. A host that has cached one gets another name.
        path = self.folder / f"{self._buckets}.safetensors"
        self.write(bucket, path)
        self._wait()
        for loaded in {*self.folder.iterdir()} - {path}:
            loaded.unlink()
        self._buckets += 1
        body = {"update_info": {"path": str(path)}}
        post = partial(self.client.post, "/update_weights", body, once=True)
        self._loading = in_background(post)

    def finish(self) -> None:
        self._wait()
        self.client.post("/finish_weight_update", {"weight_version": self.version}, once=True)
        self.forget_prefixes()
        self.client.post("/resume", once=True)
        for path in self.folder.iterdir():
            path.unlink()
        found = self.client.get(VERSION)
        if found != {"weight_version": self.version}:
            raise RLHFError(
                f"{self.client.url}{VERSION} answered {found} after the weights {self.version!r} "
                "were sent; does another run use this server?"
            )

    def _wait(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.result()
            self.client.close()  # Also the connection of its thread, which has ended.


@define(eq=False)
class Adapter(Transfer):
    """A LoRA adapter, as a folder with its config. The weights of the base stay as they are."""

    by_version = False
    config: Any = None
    """peft's config of the adapter."""
    _weights: dict[str, Tensor] = field(factory=dict, init=False)

    @property
    def model(self) -> str:
        return f"{self.served}-{self.version}"

    def begin(self) -> None:
        if self.number:
            self.client.post("/v1/unload_lora_adapter", {"lora_name": self.model}, once=True)
        super().begin()
        self._weights = {}

    def put(self, bucket: Mapping[str, Tensor]) -> None:
        self._weights |= {name: value.to("cpu", copy=True) for name, value in bucket.items()}

    def finish(self) -> None:
        folder = self.folder / self.version
        folder.mkdir()
        self.write(self._weights, folder / "adapter_model.safetensors")
        self.config.save_pretrained(folder)
        body = {"lora_name": self.model, "lora_path": str(folder)}
        self.client.post("/v1/load_lora_adapter", body, once=True)
        shutil.rmtree(folder)
