"""A configured model ready for a backend, through transformers' own loaders, whole or in shards."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from rlhf.config.sections import Config, ModelConfig
from rlhf.engine import Axis, Mesh, Plan
from rlhf.errors import RLHFError, listed
from rlhf.model.accelerated import kernels_on, needed_kernels
from rlhf.model.architecture import DTYPES, from_config, read_architecture
from rlhf.model.dropout import without_noise
from rlhf.model.packed import PackedModel
from rlhf.model.parts import beyond_text, decoder
from rlhf.model.role import ModelSpec
from rlhf.model.router import router_loss_of
from rlhf.model.task import Task
from rlhf.model.trainable import four_bits, prepare_trainable, raise_if_rate_of_frozen
from rlhf.model.weights import pretrained_model, random_model
from rlhf.registry.gateway import BackendGateway


def load_model(spec: ModelSpec, *, plan: Plan, mesh: Mesh, hooks: BackendGateway) -> PackedModel:
    """Return a model, ready for the backend's `prepare`, its weights loaded or drawn at random.

    Every rank loads the model onto its device. If the plan is `sharded`, the module is created in
    shards and only rank 0 reads the weights, which is collective.
    """
    config, task = spec.config, spec.head_task
    architecture = read_architecture(config, task, spec.labels)
    kernels, layers = needed_kernels(config.model), ""
    if kernels is not None:
        kernels.check(architecture, config.model, mesh.device)
    dtype = DTYPES[plan.precision]
    if plan.sharded:
        causal = load_sharded(architecture, spec, plan, mesh, hooks)
    else:
        # A device need not have room for layers that are divided later.
        device = mesh.device if plan.tensor == 1 else torch.device("cpu")
        causal = load_whole(architecture, config, task, dtype, device=device)
    if kernels is not None:
        towers = beyond_text(causal)
        layers = kernels.change(decoder(causal), config.model, mesh.device, towers)
    return packed_model(causal, spec, dtype, mesh.device, mesh.sequence, layers=layers)


def packed_model(
    causal: Any, spec: ModelSpec, dtype: torch.dtype, device: torch.device, sequence: Axis,
    layers: str = "",
) -> PackedModel:  # fmt: skip
    """Return a transformers model as `spec` asks for it: with adapters, frozen parameters and
    recomputation as configured, and with the trainer's own parameters."""
    extra = {name: value.to(device, dtype, copy=True) for name, value in spec.extra.items()}
    images = spec.trains_on_images
    if spec.trained:
        raise_if_rate_of_frozen(spec.config, images=images)
    model = prepare_trainable(causal, spec.config, spec.head_task, images=images)
    if kernels := kernels_on(device):
        kernels.fuse_adapters(model, spec.config.model, device)
    module = PackedModel(
        model,
        layers=layers,
        extra=extra,
        sequence=sequence,
        router_loss=router_loss_of(causal, spec.config.model.router_loss),
    )
    for name in spec.averages:
        # In 16 bits small moves would be rounded away.
        module.extra[name] = nn.Parameter(module.extra[name].float(), requires_grad=False)
    if not spec.dropout:
        without_noise(module)
    return module


def load_whole(
    architecture: Any, config: Config, task: Task, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return the whole model on `device`."""
    if config.model.init == "random":
        return random_model(architecture, config, task, dtype).to(device)
    options: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    if config.model.quantize is not None:
        options["quantization_config"] = four_bits(config, dtype, device)
    return pretrained_model(architecture, config, task, dtype, **options)


def load_sharded(
    architecture: Any, spec: ModelSpec, plan: Plan, mesh: Mesh, hooks: BackendGateway
) -> Any:
    """Return the model in shards: an accelerator holds at most its share and one layer, and one
    host holds one whole copy. Collective.

    Rank 0's copy comes from transformers' own loader, so renamed and merged weights are right.
    """
    config, task, dtype = spec.config, spec.head_task, DTYPES[plan.precision]
    check_shardable(config.model, task)
    with hooks.model_context(plan=plan, role=spec.role, mesh=mesh), no_init_weights():
        causal = from_config(architecture, config, task, dtype=dtype)
    causal.tie_weights()
    host = torch.device("cpu")
    source = mesh.on_rank_zero(
        lambda: load_whole(architecture, config, task, dtype, device=host), share=False
    )
    weights = source.state_dict() if source is not None else None
    match_weights(config.model.path, causal, source, mesh)
    missing = hooks.load_weights(module=causal, weights=weights, plan=plan, mesh=mesh)
    assert not missing, f"transformers' loader returned no {missing}"
    copy_buffers(causal, source, mesh)
    return causal


def match_weights(path: str, causal: Any, source: Any, mesh: Mesh) -> None:
    """Give each parameter its dtype in rank 0's whole model, since a backend may create all in one.
    Raises RLHFError if this rank's module has no place for a weight: its host may have other files.
    Collective."""
    dtypes = mesh.on_rank_zero(lambda: {n: item.dtype for n, item in source.named_parameters()})
    own = dict(causal.named_parameters())
    if others := [name for name in dtypes if name not in own]:
        raise RLHFError(
            f"model.path {path} has {listed(others)} on the host of rank 0, but not on that of "
            f"rank {mesh.rank}; copy the same files to all hosts"
        )
    for name, dtype in dtypes.items():
        own[name].data = own[name].data.to(dtype)


def check_shardable(model: ModelConfig, task: Task) -> None:
    """Raise RLHFError for what cannot be in shards."""
    if model.quantize is not None:
        raise RLHFError(
            "model.quantize nf4 cannot be sharded at ZeRO stage 3; choose stage 2 or lower, or "
            "remove model.quantize"
        )
    if model.adapter:
        from rlhf.model.adapters import base_reader, read_adapter  # late: start-up time

        if variant := base_reader(read_adapter(model.adapter, task)):
            raise RLHFError(
                f"model.adapter {model.adapter} is a {variant} adapter, which cannot be trained at "
                "ZeRO stage 3; choose stage 2 or lower"
            )


def copy_buffers(module: nn.Module, source: Any, mesh: Mesh) -> None:
    """Copy every buffer from rank 0's whole model. Collective.

    In a module created in shards, buffers that are computed rather than loaded (rotary frequencies)
    may have another dtype or no values.
    """
    buffers: Mapping[str, Tensor] = mesh.on_rank_zero(lambda: dict(source.named_buffers()))
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        old = module.get_buffer(name)
        setattr(module.get_submodule(owner), leaf, value.to(old.device, copy=True))
