"""Tokenizer and model of a configuration, through transformers' own loaders at every ZeRO stage."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rlhf.config.sections import Config
from rlhf.engine import Mesh, ModelShape, Plan
from rlhf.errors import RLHFError
from rlhf.model.packed import PackedModel
from rlhf.model.trainable import four_bits, prepare_trainable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)
"""torch's own modules that normalise."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template that many models share, for `data.chat_template: chatml`."""


def load_tokenizer(config: Config) -> Any:
    """The tokenizer beside the model, or `model.tokenizer`, with `data.chat_template` applied."""
    model, template = config.model, config.data.chat_template
    revision = None if model.tokenizer else model.revision
    path = resolved(model.tokenizer or model.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise RLHFError(
            f"no tokenizer in {path} ({first_line(error)}): name one with model.tokenizer"
        ) from error
    if template == "chatml":
        tokenizer.chat_template = CHATML
    elif template is not None:
        if not Path(template).is_file():
            raise RLHFError(
                f"data.chat_template {template} is no file: give a file with a Jinja template, or "
                f"chatml"
            )
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    return tokenizer


Task = Literal["causal", "sequence", "token"]
"""What stands on the backbone: the language-model head, one score per sequence, or scores per token
(the transformers classes ForCausalLM, ForSequenceClassification, ForTokenClassification)."""


def model_shape(config: Config, *, task: Task = "causal") -> ModelShape:
    """The model's size, counted on the meta device: no weight is read, no memory taken."""
    architecture = read_architecture(config)
    with torch.device("meta"):
        causal = from_config(architecture, config, dtype=DTYPES[config.model.dtype])
    text = causal.config.get_text_config()
    lists = [module for module in causal.modules() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=num_parameters, default=nn.ModuleList())
    largest = [num_parameters(layer) for layer in layers]
    largest.append(num_parameters(causal.get_input_embeddings()))
    module = prepare_trainable(causal, config, shape_only=True)
    return ModelShape(
        parameters=num_parameters(module),
        trainable=sum(p.numel() for p in module.parameters() if p.requires_grad),
        largest_layer=max(largest),
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
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
    architecture = read_architecture(config)
    dtype = DTYPES[plan.precision]
    if plan.stage == 3:
        causal = load_sharded(architecture, config, dtype, plan, mesh, hooks, role)
    else:
        causal = load_whole(architecture, config, dtype, device=mesh.device)
    return PackedModel(prepare_trainable(causal, config))


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


def load_whole(architecture: Any, config: Config, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal LM on `device`."""
    if config.model.init == "random":
        return random_model(architecture, config, dtype).to(device)
    options: dict[str, Any] = {}
    if device.type != "cpu":
        options["device_map"] = {"": device}
    if config.model.quantize is not None:
        options["quantization_config"] = four_bits(config, dtype, device)
    return pretrained_model(architecture, config, dtype, **options)


def load_sharded(
    architecture: Any,
    config: Config,
    dtype: torch.dtype,
    plan: Plan,
    mesh: Mesh,
    hooks: Any,
    role: str,
) -> Any:
    """The causal LM in shards: no accelerator holds more than its share and one layer, and one host
    one copy. Rank 0's copy comes from transformers' own loader, so renamed and merged weights are
    right."""
    if config.model.quantize is not None:
        raise RLHFError(
            "model.quantize nf4 cannot be sharded at ZeRO stage 3: choose stage 2 or less, or take "
            "model.quantize out"
        )
    with hooks.model_context(plan=plan, role=role), no_init_weights():
        causal = from_config(architecture, config, dtype=dtype)
    causal.tie_weights()
    source, problem = None, None
    if mesh.rank == 0:
        try:
            source = (
                random_model(architecture, config, dtype)
                if config.model.init == "random"
                else pretrained_model(architecture, config, dtype)
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


def random_model(architecture: Any, config: Config, dtype: torch.dtype) -> Any:
    """New weights from `train.seed`, drawn on the host in float32: the same for any rank, stage and
    dtype.

    Buffers stay as they are computed: rotary frequencies rounded to 16 bits would be wrong.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        causal = from_config(architecture, config, dtype=torch.float32)
    for parameter in causal.parameters():
        parameter.data = parameter.data.to(dtype)
    causal.config.dtype = dtype
    return causal


def pretrained_model(architecture: Any, config: Config, dtype: torch.dtype, **options: Any) -> Any:
    """The weights of `model.path`; an error when some of the model's are not there."""
    path = resolved(config.model.path)
    try:
        causal, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=architecture,
            dtype=dtype,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
            weights_only=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError) as error:
        raise RLHFError(
            f"the weights of {path} do not load: {first_line(error)}; check model.path, or set "
            f"model.init to random for new weights"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise RLHFError(
            f"{path} has no weights for {missing[0]}{others} of {type(causal).__name__}: "
            f"model.path "
            f"must be a whole causal language model"
        )
    return causal


def from_config(architecture: Any, config: Config, *, dtype: torch.dtype) -> Any:
    """A causal LM of this architecture without loaded weights."""
    return AutoModelForCausalLM.from_config(
        architecture, dtype=dtype, trust_remote_code=config.model.trust_remote_code
    )


def read_architecture(config: Config) -> Any:
    """transformers' config of `model.path`; an error where it is not that of a causal language
    model."""
    path = resolved(config.model.path)
    try:
        found = AutoConfig.from_pretrained(
            path, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise RLHFError(
            f"model.path {path} is neither a folder with a config.json nor a model of the hub that "
            f"can be "
            f"read: {first_line(error)}"
        ) from error
    own_code = "AutoModelForCausalLM" in (getattr(found, "auto_map", None) or {})
    written = (getattr(found, "architectures", None) or [""])[0]
    known = type(found) in MODEL_FOR_CAUSAL_LM_MAPPING and not written.endswith("ForMaskedLM")
    if not known and not own_code:
        raise RLHFError(
            f"model.path {path} is {written or found.model_type}, not a causal language model: "
            f"choose one "
            f"that transformers opens as AutoModelForCausalLM"
        )
    return found


def resolved(path: str) -> str:
    """The folder behind `demo:base`; any other path as it is."""
    if path == "demo:base":
        from rlhf.demo import base_model_folder

        return str(base_model_folder())
    if not path:
        raise RLHFError("model.path is empty: give the folder or hub name of a model")
    return path


def first_line(error: Exception) -> str:
    """An exception's text for an error of one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
