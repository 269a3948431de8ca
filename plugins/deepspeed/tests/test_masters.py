"""Stages 1 and 2 over bf16 states, without a second copy of the weights."""

import pytest
import torch

from rlhf_devkit.problem import Case, configure, follow, start
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig


def copies(states):
    """Whether the optimizer holds a copy of this rank's weights, and what DeepSpeed knows of it."""
    backend = DeepSpeedBackend()
    config = configure(DeepSpeedConfig(stage=2), dtype="bf16", states=states)
    mesh, engine, _ = start(backend, Case(config=config))
    optimizer = engine.deepspeed.optimizer
    own = optimizer.single_partition_of_fp32_groups
    parts = [parts[mesh.rank] for parts in optimizer.parallel_partitioned_bit16_groups]
    stores = {item.untyped_storage().data_ptr() for item in parts}
    fragments = {
        item._hp_mapping.hp_fragment.untyped_storage().data_ptr()
        for group in optimizer.bit16_groups
        for item in group
        if item._hp_mapping is not None
    }
    backend.close_mesh(mesh)
    inside = {item.untyped_storage().data_ptr() for item in own} <= stores
    return not inside, not fragments <= stores


@pytest.mark.parametrize(("states", "copied"), [("fp32", True), ("bf16", False)])
def test_states_in_bf16_are_over_the_weights_themselves(pair, states, copied):
    assert pair.run(copies, states) == [(copied, copied)] * 2


def saved(folder, settings):
    """Elements of what a checkpoint has of this rank's weights, and of what is stored for them."""
    backend = DeepSpeedBackend()
    config = configure(DeepSpeedConfig(**settings), dtype="bf16", states="bf16")
    mesh, engine, _ = start(backend, Case(config=config))
    groups = engine.deepspeed.optimizer.state_dict()["single_partition_of_fp32_groups"]
    backend.close_mesh(mesh)
    return [(item.numel(), item.untyped_storage().nbytes() // 2) for item in groups]


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}], ids=str)
def test_a_checkpoint_has_each_weight_of_a_rank_once(pair, settings, tmp_path):
    for groups in pair.run(saved, tmp_path, settings):
        assert all(elements == stored for elements, stored in groups)
        assert sum(elements for elements, _ in groups) < 2000


def train(case):
    """The outcome and the final weights."""
    backend = DeepSpeedBackend()
    outcome, engine, mesh = follow(backend, case)
    weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    backend.close_mesh(mesh)
    return outcome, weights


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}], ids=str)
def test_the_curve_is_the_same_with_and_without_master_copies(pair, settings):
    (with_copies, weights), (without, others) = (
        pair.run(
            train,
            Case(
                config=configure(
                    DeepSpeedConfig(patches=patches, **settings), dtype="bf16", states="bf16"
                )
            ),
        )[0]
        for patches in ("correctness", "all")
    )
    assert with_copies.losses == without.losses
    assert with_copies.norms == without.norms
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


def stage_0(case):
    """The masters and the final weights of a run at stage 0."""
    backend = DeepSpeedBackend()
    outcome, engine, mesh = follow(backend, case)
    optimizer = engine.deepspeed.optimizer
    weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    backend.close_mesh(mesh)
    return len(optimizer.fp32_groups_flat), optimizer.optimizer, outcome, weights


def test_stage_0_updates_flat_masters_by_torchs_adamw(single):
    config = configure(DeepSpeedConfig(stage=0), dtype="bf16")
    masters, optimizer, *_ = stage_0(Case(config=config))
    assert masters == len(optimizer.param_groups)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["fused"]
