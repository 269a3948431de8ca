"""The plan of a model that is not trained: whole, in shards, or in shards on the CPU."""

from collections.abc import Mapping

from attrs import evolve

from rlhf.engine import Mesh, ModelShape, gib
from rlhf.errors import RLHFError
from rlhf.plugin import Config
from rlhf_plugin_deepspeed.capabilities import stages_for
from rlhf_plugin_deepspeed.config import Resolved, settings_of
from rlhf_plugin_deepspeed.memory import estimate
from rlhf_plugin_deepspeed.plans import ZeroPlan
from rlhf_plugin_deepspeed.zero import SHARE, plan_at, restricted

Way = int | str

AMPLE = 0.8
"""The share of the accelerator's memory up to which weights are not moved to the CPU."""
WAYS: Mapping[Way, Resolved] = {
    0: Resolved(stage=0),
    3: Resolved(stage=3),
    "offload": Resolved(stage=3, offload_param=True),
}
"""What a value of `deepspeed.frozen` means, the fastest first."""


def plan_frozen(config: Config, mesh: Mesh, shape: ModelShape, *, occupied: int = 0) -> ZeroPlan:
    """Return the plan of a model that is not trained: whole on every rank if that leaves room, else
    in shards, else in shards on the CPU. Others take `occupied` bytes of each accelerator. Raises
    RLHFError where `deepspeed.frozen` cannot be combined with the model."""
    setting = config.backend_section.frozen
    plans = {name: plan_at(config, mesh, shape, WAYS[name]) for name in _frozen_ways(config)}
    sizes = {
        name: estimate(config, made, shape, world=mesh.shards.size, trained=False)["weights"]
        for name, made in plans.items()
    }
    chosen, why = setting, "as configured"
    if setting == "auto":
        chosen, why = _choose_frozen(sizes, mesh, occupied)
    made = plan_at(config, mesh, shape, WAYS[chosen], why=why)
    return evolve(made, summary=made.summary + restricted(config))


def _frozen_ways(config: Config) -> list[Way]:
    """Return the values of `deepspeed.frozen` that the model allows."""
    settings = settings_of(config, Resolved(stage=0))
    names = [name for name in settings if name.startswith(("model.", "deepspeed.tensor"))]
    ways = [name for name, way in WAYS.items() if way.stage in stages_for(names)]
    setting = config.backend_section.frozen
    if setting not in ("auto", *ways):
        raise RLHFError(
            f"deepspeed.frozen {setting} cannot be combined with {' and '.join(names)}; set "
            "deepspeed.frozen to 0"
        )
    return ways


def _choose_frozen(sizes: Mapping[Way, int], mesh: Mesh, occupied: int) -> tuple[Way, str]:
    """Return the first way that leaves room, and the reason. `sizes` has the bytes of each."""
    if not mesh.memory:
        return 0, "the device's memory is unknown"
    # Shards on one rank are the whole model.
    useful = [name for name in sizes if name == 0 or sizes[name] < sizes[0]]
    for name in useful:
        share = SHARE if name == 0 and 3 in useful else AMPLE
        budget = f"{share:.0%} of {gib(mesh.memory)} GiB"
        others = f", with {gib(occupied)} GiB of other models" if occupied else ""
        if sizes[name] + occupied <= share * mesh.memory:
            return name, f"frozen: {gib(sizes[name])} GiB in {budget}{others}"
    return useful[-1], f"frozen: more than {budget}{others}"
