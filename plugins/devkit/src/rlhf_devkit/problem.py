"""A tiny model and a fixed problem by which backends are compared: the same curve, whatever the
layout."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from attrs import field, frozen
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlhf.config.sections import Config, ModelConfig, OptimConfig
from rlhf.engine import Mesh, ModelShape, Plan, StateKind
from rlhf.model.architecture import DTYPES
from rlhf.train.checkpointing import RUN, restore_schedule
from rlhf.train.exporting import whole_weights as gathered
from rlhf.train.fragments import SavedEngine, fragments_to_write, write_fragments, write_plain

ROWS = 8
VOCABULARY = 32
WIDTH = 16


class Layer(nn.Module):
    """A residual block with a norm, so that parameters differ in shape and decay."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class TinyModel(nn.Module):
    """Embedding, layers and a head that is the embedding's own weight (tied) or one of its own."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.full((1,), 2.0))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden * self.scale.to(hidden.dtype)


class Packed(nn.Module):
    """The shape of the module that backends are given: `forward(batch, readout)`."""

    def __init__(self, model: TinyModel | None = None, *, tied: bool = True) -> None:
        super().__init__()
        self.model = TinyModel(tied=tied) if model is None else model

    def forward(self, batch: Mapping[str, Tensor], readout: Any) -> Mapping[str, Tensor]:
        return readout(self.model(batch["tokens"]), self.model.head, batch)


def losses(hidden: Tensor, head: nn.Linear, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cross entropy of each row [B], in fp32."""
    logits = nn.functional.linear(hidden, head.weight).float()
    entropy = nn.functional.cross_entropy(
        logits.transpose(1, 2), batch["targets"], reduction="none"
    )
    return {"loss": entropy.sum(dim=-1) * batch["weight"]}


@frozen(kw_only=True)
class BackendConfig(Config):
    """Core's sections and that of a backend."""

    trainer_name: ClassVar[str] = "none"
    backend_name: ClassVar[str] = "section"

    section: Any = None


def configure(
    section: Any = None,
    *,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    states: Literal["fp32", "bf16"] = "fp32",
    clip: float = 0.5,
    optimizer: str = "adamw",
) -> BackendConfig:
    """Return a configuration whose clipping is active and whose decay shows."""
    optim = OptimConfig(lr=0.02, clip=clip, weight_decay=0.1, states=states, name=optimizer)
    return BackendConfig(model=ModelConfig(dtype=dtype), optim=optim, section=section)


@frozen(kw_only=True)
class Case:
    """How the problem is run."""

    config: Config
    micro_batches: int = 1
    passes: int = 1
    """Forward passes before each backward."""
    steps: int = 4
    tied: bool = True
    frozen: tuple[str, ...] = ()
    """Names of parameters that are not trained."""
    adapter: bool = False
    """Train only a LoRA adapter."""
    first: int = 0
    """The step whose rows come first."""
    moves: bool = False
    """Before each step the engine's states leave the device and come back."""
    poison: tuple[int, int] | None = None
    """(step, rank) at which one row's loss is not a number."""
    save: tuple[int, Path] | None = None
    """After this step a checkpoint is written to the folder."""
    load: Path | None = None
    """The checkpoint to resume from."""


@frozen(kw_only=True)
class Outcome:
    """The results of a run of the problem."""

    losses: list[float]
    norms: list[float]
    moved: list[bool]
    skipped: list[bool]
    rates: list[float]
    state: dict[str, Any] = field(factory=dict)
    """The state that the checkpoint restored."""
    summary: str = ""


def initial_weights(*, tied: bool = True) -> dict[str, Tensor]:
    """Return the state dict that every run starts from."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, value in Packed(tied=tied).state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        middle = 1.0 if "norm.weight" in name else 0.0
        weights[name] = value if name == "model.scale" else middle + 0.3 * noise
    if tied:
        weights["model.head.weight"] = weights["model.embed.weight"]
    return weights


def shape() -> ModelShape:
    """Return the size of the tiny model."""
    count = sum(parameter.numel() for parameter in Packed().parameters())
    return ModelShape(
        parameters=count,
        trainable=count,
        largest_layer=count // 2,
        hidden=WIDTH,
        layers=2,
        head=VOCABULARY * WIDTH,
    )


def start(backend: Any, case: Case) -> tuple[Any, Any, str]:
    """Return the mesh, a prepared engine and the plan's summary."""
    mesh = backend.setup_mesh(config=case.config)
    plan, module = load(backend, case, mesh, "policy", trained=True)
    if case.adapter:
        targets = ["up", "down"]
        module.model = get_peft_model(
            module.model, LoraConfig(r=2, target_modules=targets), autocast_adapter_dtype=False
        )
    else:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in case.frozen)
    # Only the gateway answers a hook that the backend leaves to core.
    if hasattr(backend, "shard"):
        backend.shard(model=module, plan=plan, mesh=mesh)
    groups = _groups(module, case.config)
    optimizer = backend.build_optimizer(groups=groups, config=case.config, plan=plan, model=module)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine = backend.prepare(
        model=module, optimizer=optimizer, schedule=schedule, role="policy", plan=plan, mesh=mesh
    )
    return mesh, engine, plan.summary


def load(backend: Any, case: Case, mesh: Mesh, role: str, *, trained: bool) -> tuple[Plan, Packed]:
    """Return the plan of a role, and its module with the initial weights.

    As in a run (`rlhf.model.load`), the hooks of sharded weights see the model without the wrapper
    that the others see, and only of a sharded plan.
    """
    plan = backend.configure_zero(
        config=case.config, mesh=mesh, model_shape=shape(), role=role, trained=trained, occupied=0
    )
    named = initial_weights(tied=case.tied).items()
    weights = {name.removeprefix("model."): value for name, value in named}
    if plan.sharded:
        with backend.model_context(plan=plan, role=role, mesh=mesh):
            model = TinyModel(tied=case.tied)
        whole = weights if mesh.rank == 0 else None
        missing = backend.load_weights(module=model, weights=whole, plan=plan, mesh=mesh)
        assert missing == (), f"load_weights did not find {missing}"
    else:
        model = TinyModel(tied=case.tied)
        model.load_state_dict(weights)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[plan.precision])
    return plan, Packed(model)


def look(backend: Any, engine: Any) -> None:
    """Do what a run does with an engine before its first step: run it without gradient, as the
    probe of attention does, and see what a checkpoint would hold, to know its size."""
    engine.eval()
    with torch.no_grad():
        engine(make_batch(0, range(2), engine.device), losses)
    backend.save_checkpoint(engine=engine)


def move_states(backend: Any, engine: Any) -> None:
    """Move the engine's states to the host and back, the kinds one by one and together."""
    kinds = get_args(StateKind)
    for some in (*((kind,) for kind in kinds), kinds):
        backend.offload_states(engine=engine, kinds=some)
        backend.reload_states(engine=engine, kinds=some)


def follow(backend: Any, case: Case) -> tuple[Outcome, Any, Any]:
    """Run the case; returns its outcome, the engine and the mesh, which the caller closes."""
    mesh, engine, summary = start(backend, case)
    try:
        look(backend, engine)
        return _followed(backend, case, mesh, engine, summary), engine, mesh
    except BaseException:
        # Other ranks may still wait for this one.
        if mesh.world == 1:
            backend.close_mesh(mesh=mesh)
        raise


def _followed(backend: Any, case: Case, mesh: Any, engine: Any, summary: str) -> Outcome:
    state = _restore(backend, engine, case.load) if case.load else {}
    seen: dict[str, list[Any]] = {
        name: [] for name in ("losses", "norms", "moved", "skipped", "rates")
    }
    for step in range(state.get("step", case.first), case.steps):
        engine.train()
        if case.moves:
            move_states(backend, engine)
        loss = _step_loss(engine, mesh, case, step)
        seen["rates"].append(engine.schedule.get_last_lr()[0])
        outcome = engine.step().read()
        seen["losses"].append(float(mesh.data.sum(loss)))
        seen["norms"].append(outcome.grad_norm)
        seen["moved"].append(outcome.moved)
        seen["skipped"].append(outcome.skipped_by_scaler)
        if case.save and case.save[0] == step + 1:
            _save(backend, engine, mesh, case.save[1], step=step + 1)
    return Outcome(**seen, state=state, summary=summary)


def _save(backend: Any, engine: Any, mesh: Any, folder: Path, *, step: int) -> None:
    """Write the engine's part of a checkpoint."""
    state = backend.save_checkpoint(engine=engine)
    write_fragments(fragments_to_write(state, mesh), folder, mesh.rank)
    if mesh.rank == 0:
        write_plain(engine, state, folder)
        schedule = engine.schedule.state_dict()
        (folder / RUN).write_text(
            json.dumps({"step": step, "schedule": schedule}), encoding="utf-8"
        )
    mesh.barrier()


def _restore(backend: Any, engine: Any, folder: Path) -> dict[str, Any]:
    """Restore what `_save` wrote; returns the step."""
    backend.load_checkpoint(engine=engine, saved=SavedEngine(folder))
    state = json.loads((folder / RUN).read_text(encoding="utf-8"))
    restore_schedule(engine.schedule, state.pop("schedule"))
    return state


def whole_weights(backend: Any, engine: Any) -> dict[str, Tensor]:
    """Return the engine's whole weights and buffers on every rank, tied ones once. Collective."""
    return gathered(backend, engine, keep=True)


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint that `follow` wrote, tied ones once."""
    return SavedEngine(folder).weights()


def _step_loss(engine: Any, mesh: Any, case: Case, step: int) -> Tensor:
    """Backward over this rank's rows in micro-batches; returns the sum of its losses."""
    rows = list(range(ROWS))[mesh.data.rank :: mesh.data.size]
    total = torch.zeros((), device=engine.device)
    for micro in range(case.micro_batches):
        chosen = rows[micro :: case.micro_batches]
        batch = make_batch(step, chosen, engine.device)
        if case.poison == (step, mesh.rank) and micro == 0:
            batch["weight"][0] = float("nan")
        parts = _parts(batch, case.passes)
        loss = sum(engine(part, losses)["loss"].sum() for part in parts) / ROWS
        engine.backward(loss, last=micro == case.micro_batches - 1)
        total += loss.detach()
    return total


def make_batch(step: int, rows: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return the `rows` of a step, of `ROWS`."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (ROWS, 6), generator=generator)[list(rows)].to(device)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weight": torch.ones(len(rows), device=device),
    }


def _parts(batch: dict[str, Tensor], num: int) -> list[dict[str, Tensor]]:
    """Return the batch's rows in `num` batches."""
    each = {name: value.tensor_split(num) for name, value in batch.items()}
    return [{name: parts[k] for name, parts in each.items()} for k in range(num)]


def _groups(module: nn.Module, config: Config) -> list[dict[str, Any]]:
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (rest if "norm" in name or "bias" in name else decayed).append(parameter)
    groups = [(decayed, config.optim.weight_decay), (rest, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
