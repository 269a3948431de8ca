"""Tokenizer and model of a configuration, through transformers' own loaders at every ZeRO stage."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer
from transformers.initialization import no_init_weights

from rlhf.config.sections import Config
from rlhf.engine import Mesh, ModelShape, Plan, fused_on
from rlhf.errors import RLHFError
from rlhf.model.head import read_head
from rlhf.model.kernels.compiled import check_compilable, compiles, rehearse_compiled
from rlhf.model.kernels.fused import check_forgettable, check_fusible, fuse, products_of
from rlhf.model.kernels.gates import forget_products
from rlhf.model.packed import PackedModel, decoder
from rlhf.model.task import FORMS, Task, prepare_architecture, written_class
from rlhf.model.trainable import four_bits, prepare_trainable
from rlhf.model.weights import (
    first_line,
    from_config,
    pretrained_model,
    random_model,
    resolved,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)
"""torch's own modules that normalise."""

CHATML = (
    "{% if tools %}{{ raise_exception('chatml has no form for tools') }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['tool_calls'] %}{{ raise_exception('chatml has no form for tool calls') }}"
    "{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] is iterable %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}{{ raise_exception('chatml has no form for a part that is no text') }}{% endif %}"
    "{% endfor %}"
    "{% else %}{{ raise_exception('a message has no content') }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template that many models share, for `data.chat_template: chatml`. What it has no form for it
refuses."""


def load_tokenizer(config: Config) -> Any:
    """The tokenizer beside the model, or `model.tokenizer`, with `data.chat_template` applied."""
    model, template = config.model, config.data.chat_template
    revision = None if model.tokenizer else model.revision
    path = resolved(model.tokenizer or model.path)
    if not Path(path).is_dir() and (Path(path).is_absolute() or Path(path).exists()):
        raise RLHFError(f"{path} is no folder: give the folder or hub name of a model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # A damaged folder may raise anything.
        raise RLHFError(
            f"no tokenizer in {path} ({first_line(error)}): name one with model.tokenizer"
        ) from error
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        # transformers 5.0 makes an empty one where a folder has none.
        raise RLHFError(f"no tokenizer in {path} (no tokens in it): name one with model.tokenizer")
    if template == "chatml":
        tokenizer.chat_template = CHATML
    elif template is not None:
        if not Path(template).is_file():
            raise RLHFError(
                f"data.chat_template {template} is no file: give a file with a Jinja template, or "
                f"chatml"
            )
        try:
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RLHFError(
                f"data.chat_template {template} cannot be read: {first_line(error)}"
            ) from error
    return tokenizer


def model_shape(config: Config, *, task: Task = "causal") -> ModelShape:
    """The model's size, counted on the meta device: no weight is read, no memory taken."""
    return shape_of(empty_model(config, task))


def empty_model(config: Config, task: Task = "causal") -> PackedModel:
    """The model of `config` on the meta device, with adapters, freezing and recomputation: its
    parameters have shapes and no values."""
    architecture = read_architecture(config, task)
    with torch.device("meta"):
        causal = from_config(architecture, config, task, dtype=DTYPES[config.model.dtype])
    check_forgettable(architecture, config.model.recompute)
    if compiles(config.model):
        again = config.model.recompute == "full"
        rehearse_compiled(decoder(causal), config.model.fp8, again=again)
    else:
        # A machine without an accelerator rehearses the model's own layers.
        asked = config.model.kernels if fused_on("meta") else "none"
        fuse(decoder(causal), asked, torch.device("meta"))
    forget(causal, config)
    return PackedModel(prepare_trainable(causal, config, task, shape_only=True))


def shape_of(module: PackedModel) -> ModelShape:
    """The size of a whole model."""
    causal = module.causal
    text = causal.config.get_text_config()
    lists = [part for part in causal.modules() if isinstance(part, nn.ModuleList)]
    layers = max(lists, key=num_parameters, default=nn.ModuleList())
    embedding = causal.get_input_embeddings().weight
    head = read_head(causal).weight
    return ModelShape(
        parameters=num_parameters(module),
        trainable=sum(p.numel() for p in module.parameters() if p.requires_grad),
        largest_layer=max([embedding.numel(), *(num_parameters(layer) for layer in layers)]),
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        head=head.numel(),
        lookup=0 if embedding is head else embedding.numel(),
    )


def num_parameters(module: nn.Module) -> int:
    """Parameters of `module`, tied ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def load_model(
    config: Config,
    *,
    plan: Plan,
    mesh: Mesh,
    hooks: Any,
    role: str = "policy",
    task: Task = "causal",
) -> PackedModel:
    """The model of `config`, ready for the backend's `prepare`: loaded or made from random numbers,
    with adapters, freezing and recomputation as configured.

    Below stage 3 every rank loads onto its device; at stage 3 the module is created in shards and
    rank 0 alone reads the weights. Collective at stage 3.
    """
    architecture = read_architecture(config, task)
    check_fusible(architecture, config.model.kernels, mesh.device)
    check_forgettable(architecture, config.model.recompute)
    check_compilable(config, mesh.device)
    check_recomputable(config, mesh.device)
    dtype = DTYPES[plan.precision]
    if plan.stage == 3:
        causal = load_sharded(architecture, config, task, dtype, plan, mesh, hooks, role)
    else:
        causal = load_whole(architecture, config, task, dtype, device=mesh.device)
    asked = "none" if compiles(config.model) else config.model.kernels
    layers = fuse(decoder(causal), asked, mesh.device)
    forget(causal, config)
    return PackedModel(prepare_trainable(causal, config, task), layers=layers)


def check_recomputable(config: Config, device: torch.device) -> None:
    """Raises RLHFError where `model.recompute: offload` would save nothing."""
    if config.model.recompute == "offload" and device.type == "cpu":
        raise RLHFError(
            "model.recompute offload keeps inputs on the host, where this run is: set "
            "model.recompute to full"
        )


def forget(causal: Any, config: Config) -> None:
    """`model.recompute: selective`: keep the factors of gated layers, not their product."""
    if config.model.recompute == "selective":
        part = decoder(causal)
        forget_products(part, products_of(part))


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters in groups for the optimizer: `{"params": [...], "weight_decay":
    float}`.

    Decay is for matrices outside of norm modules: what has fewer than two dimensions in the module
    as created (under ZeRO-3 a parameter itself is flat), a norm's weight and a bias do not decay.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    seen: set[int] = set()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
            decays = matrix and not is_norm(owner) and not name.endswith("bias")
            (decayed if decays else kept).append(parameter)
    groups = [(decayed, weight_decay), (kept, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises; models bring RMS norms of their own under such class names."""
    return isinstance(module, NORMS) or type(module).__name__.endswith("Norm")


def load_whole(
    architecture: Any, config: Config, task: Task, dtype: torch.dtype, device: torch.device
) -> Any:
    """The model on `device`."""
    if config.model.init == "random":
        return random_model(architecture, config, task, dtype).to(device)
    options: dict[str, Any] = {}
    if device.type != "cpu":
        options["device_map"] = {"": device}
    if config.model.quantize is not None:
        options["quantization_config"] = four_bits(config, dtype, device)
    return pretrained_model(architecture, config, task, dtype, **options)


def load_sharded(
    architecture: Any,
    config: Config,
    task: Task,
    dtype: torch.dtype,
    plan: Plan,
    mesh: Mesh,
    hooks: Any,
    role: str,
) -> Any:
    """The model in shards: no accelerator holds more than its share and one layer, and one host
    one copy. Rank 0's copy comes from transformers' own loader, so renamed and merged weights are
    right."""
    if config.model.quantize is not None:
        raise RLHFError(
            "model.quantize nf4 cannot be sharded at ZeRO stage 3: choose stage 2 or less, or take "
            "model.quantize out"
        )
    with hooks.model_context(plan=plan, role=role), no_init_weights():
        causal = from_config(architecture, config, task, dtype=dtype)
    causal.tie_weights()
    source, problem = None, None
    if mesh.rank == 0:
        try:
            source = (
                random_model(architecture, config, task, dtype)
                if config.model.init == "random"
                else pretrained_model(architecture, config, task, dtype)
            )
        except RLHFError as error:
            problem = str(error)
    # The other ranks must not wait in a collective for a rank that has ended.
    problem = mesh.gather(problem)[0]
    if problem is not None:
        raise RLHFError(problem)
    weights = source.state_dict() if source is not None else None
    missing = hooks.load_weights(module=causal, weights=weights, plan=plan, mesh=mesh)
    assert not missing, f"transformers' loader gave no {missing}"
    copy_buffers(causal, source, mesh)
    return causal


def copy_buffers(module: nn.Module, source: nn.Module | None, mesh: Mesh) -> None:
    """Every buffer from rank 0's whole model: created in shards, those that are computed rather
    than loaded (rotary frequencies) may have another dtype or none of their values. Collective."""
    own = dict(source.named_buffers()) if source is not None else None
    buffers: Mapping[str, Tensor] = mesh.gather(own)[0]
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        old = module.get_buffer(name)
        setattr(module.get_submodule(owner), leaf, value.to(old.device, copy=True))


def known_tokens(config: Config) -> int | None:
    """How many tokens `model.path` has embeddings for; None where that cannot be read, of which
    loading it tells more."""
    try:
        return int(_written_config(config).get_text_config().vocab_size)
    except Exception:  # A damaged folder may raise anything.
        return None


def _written_config(config: Config) -> Any:
    model = config.model
    return AutoConfig.from_pretrained(
        resolved(model.path), revision=model.revision, trust_remote_code=model.trust_remote_code
    )


def read_architecture(config: Config, task: Task = "causal") -> Any:
    """transformers' config of `model.path`, with the labels of `task`; an error where it is not
    that of a causal language model or its family has no class for the task."""
    path = resolved(config.model.path)
    try:
        found = _written_config(config)
    except Exception as error:  # A damaged folder may raise anything.
        raise RLHFError(
            f"model.path {path} is neither a folder with a config.json nor a model of the hub that "
            f"can be "
            f"read: {first_line(error)}"
        ) from error
    own_code = "AutoModelForCausalLM" in (getattr(found, "auto_map", None) or {})
    written = written_class(found)
    known = type(found) in FORMS["causal"].mapping and not written.endswith("ForMaskedLM")
    if not known and not own_code:
        raise RLHFError(
            f"model.path {path} is {written or found.model_type}, not a causal language model: "
            f"choose one "
            f"that transformers opens as AutoModelForCausalLM"
        )
    prepare_architecture(found, task, path)
    return found
