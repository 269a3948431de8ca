"""A weight transfer backend of vLLM that reads weights from files, such as those in shared memory.

This file runs in the processes of the server, and no other file of this distribution does. vLLM
finds it as one of its general plugins if its folder is on PYTHONPATH.
"""

from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "rlhf_files"


@dataclass
class Start(WeightTransferInitInfo):
    """Nothing has to be known before the first weights."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some of the weights, under the names that a model folder has."""

    path: str
    """A safetensors file."""


class FileWeights(WeightTransferEngine[Start, Bucket]):
    """Loads buckets of weights as vLLM loads those of a model folder."""

    init_info_cls, update_info_cls = Start, Bucket

    def init_transfer_engine(self, init_info: Start) -> None:
        """Nothing has to be opened."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Bucket) -> None:
        self.model.load_weights(list(load_file(update_info.path).items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if self.device.type == "cpu" and hasattr(head, "cpu_linear"):
            # Reloading a tied embedding does not renew the packed copy that the head has on CPUs.
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        """Nothing has to be closed."""


def register() -> None:
    """Let the server use the backend; vLLM may call it more than once in a process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeights)
