"""The stages and offloads at which a configuration can run, the fastest first."""

from collections.abc import Iterator
from typing import Any

from attrs import evolve

from rlhf.engine import Layout, Mesh, ModelShape
from rlhf.errors import RLHFError
from rlhf.plugin import Config
from rlhf_plugin_deepspeed.capabilities import check_capabilities
from rlhf_plugin_deepspeed.config import PRESETS, DeepSpeedConfig, Resolved, resolve, settings_of
from rlhf_plugin_deepspeed.kinds import TITLES
from rlhf_plugin_deepspeed.versions import installed_version
from rlhf_plugin_deepspeed.zero import check_fp32, offloads, plan_at

STAGE_COSTS = {0: 0.0, 1: 0.03, 2: 0.035, 3: 0.1}
"""Share of a step that a stage adds: on H200, 1 and 2 took up to 7 % more, 3 took 6 to 14 %."""
OPTIMIZER_COST = 1.5
"""The same of an optimizer on the CPU: two H200 made 21,000 tokens/s instead of 50,000 at 0.5B."""
WEIGHTS_COST = 1.0
"""The same of weights on the CPU. Not measured: the last resort."""
FLAGS = ("offload_optimizer", "offload_param")
OFFLOADS = ((False, False), (True, False), (True, True))
"""Whether the optimizer is on the CPU, and whether the weights are: values of `FLAGS`."""


def layouts(config: Config, mesh: Mesh, shape: ModelShape) -> list[Layout]:
    """Return every layout that can be combined with the other settings."""
    section: DeepSpeedConfig = config.backend_section
    resolved = resolve(section)
    ways = []
    for target in _targets(config, resolved, shape):
        open_stage = resolved.stage == "auto"
        configured = target == (evolve(resolved, stage=target.stage) if open_stage else resolved)
        run = config if configured and not open_stage else _with(config, target)
        trained = TITLES.get(config.optim.name, "AdamW")
        ways.append(
            Layout(
                name=f"ZeRO {target.stage}{offloads(target, section)}",
                settings=_settings(section, target),
                config=run,
                plan=plan_at(run, mesh, shape, target, trained=trained),
                cost=STAGE_COSTS[int(target.stage)]
                + OPTIMIZER_COST * target.offload_optimizer
                + WEIGHTS_COST * target.offload_param,
                configured=configured,
            )
        )
    return sorted(ways, key=lambda layout: layout.cost)


def _with(config: Config, target: Resolved) -> Config:
    changes: dict[str, Any] = {"preset": "auto", "stage": target.stage}
    changes |= {name: getattr(target, name) for name in FLAGS}
    return evolve(config, **{config.backend_name: evolve(config.backend_section, **changes)})


def _targets(config: Config, resolved: Resolved, shape: ModelShape) -> Iterator[Resolved]:
    configured = tuple(getattr(resolved, name) for name in FLAGS)
    for stage in STAGE_COSTS:
        for values in dict.fromkeys((*OFFLOADS, configured)):
            target = evolve(resolved, stage=stage, **dict(zip(FLAGS, values, strict=True)))
            try:
                check_capabilities(
                    settings_of(config, target),
                    stage=stage,
                    precision=config.model.dtype,
                    version=installed_version(),
                )
                check_fp32(config, target, shape)
            except RLHFError:
                continue
            yield target


def _settings(section: DeepSpeedConfig, target: Resolved) -> str:
    """Return the settings for `target` that the section does not have."""
    flags = {name: getattr(target, name) for name in FLAGS}
    if section.preset == "auto":
        words = [] if section.stage == target.stage else [f"deepspeed.stage {target.stage}"]
        current = {name: bool(getattr(section, name)) for name in flags}
    else:
        offload = target.offload_optimizer and (target.offload_param or target.stage != 3)
        name = f"zero{target.stage}{'_offload' if offload else ''}"
        words = [f"deepspeed.preset {name}"]
        words += [f"model.dtype {target.dtype}"] if target.dtype else []
        preset = PRESETS.get(name, PRESETS["ddp"])
        current = {key: getattr(preset, key) or bool(getattr(section, key)) for key in flags}
    words += [
        f"deepspeed.{name} {str(value).lower()}"
        for name, value in flags.items()
        if value != current[name]
    ]
    return " and ".join(words)
