"""Configurations and plans of a model of 7 Gi parameters, without DeepSpeed."""

import torch
from attrs import evolve

from rlhf.engine import GIB, Mesh, ModelShape
from rlhf.plugin import ModelConfig
from rlhf_devkit.problem import configure
from rlhf_plugin_deepspeed import zero
from rlhf_plugin_deepspeed.config import DeepSpeedConfig

SHAPE = ModelShape(
    parameters=7 * GIB,
    trainable=7 * GIB,
    largest_layer=GIB // 4,
    hidden=4096,
    layers=32,
    head=32000 * 4096,
)


def config(**settings):
    run = configure()
    section = DeepSpeedConfig(**settings)
    object.__setattr__(run, "section", section)
    return run


def half(dtype="bf16", **settings):
    return evolve(config(**settings), model=ModelConfig(dtype=dtype))


def plan(world, memory, *, dtype="bf16", shape=SHAPE, **settings):
    run = half(dtype, **settings)
    mesh = Mesh(world=world, device=torch.device("cpu"), memory=memory)
    return zero.plan(run, mesh, shape)
