"""Phases between steps move states to the host when their estimate does not fit, or always."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from fits import on_accelerator, small_run

from rlhf.engine import Mesh, StateKind
from rlhf.hookspecs import hookimpl
from rlhf.memory.rehearsal import Rehearsed
from rlhf.train.offloading import TRAINING, Phase, Phases, phase_peak, shortage
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend


class Recording(PlainBackend):
    """Moves nothing, and says that it did."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, tuple[StateKind, ...]]] = []

    @hookimpl
    def offload_states(self, engine: Any, kinds: Collection[StateKind]) -> int:
        self.calls.append(("offload", engine, tuple(kinds)))
        return 2**30

    @hookimpl
    def reload_states(self, engine: Any, kinds: Collection[StateKind]) -> bool:
        self.calls.append(("reload", engine, tuple(kinds)))
        return True


def peaks(words: list[str]) -> dict[Phase, int]:
    """Bytes at the peak of each phase."""
    fit = on_accelerator(words, 2**30)
    phases: tuple[Phase, ...] = ("evaluation", "caching", "generation")
    return {phase: phase_peak(fit, phase) for phase in phases}


def test_a_phase_is_short_of_memory_where_its_states_and_its_forward_do_not_fit(
    tmp_path: Path,
) -> None:
    words = small_run(tmp_path)
    for phase, peak in peaks(words).items():
        assert not shortage(on_accelerator(words, int(peak / 0.94)), phase)
        reason = shortage(on_accelerator(words, int(peak / 0.96)), phase)
        assert reason.startswith("since it would take 0.00")


def test_caching_runs_more_tokens_and_generation_keeps_keys_and_values(tmp_path: Path) -> None:
    words = small_run(tmp_path)
    size = peaks(words)
    step = on_accelerator(words, 2**30).peak
    assert step is not None
    assert size["evaluation"] < min(size["caching"], size["generation"], step)


def test_nothing_is_rehearsed_for_a_device_that_is_the_host(tmp_path: Path) -> None:
    fit = attrs.evolve(on_accelerator(small_run(tmp_path), 2**10), mesh=Mesh(memory=2**10))
    assert shortage(fit, "caching") == ""
    assert "estimate" not in vars(fit)


def enter(
    words: list[str], memory: int, mode: str, *, running: str | None = None, times: int = 1
) -> list[tuple[str, Any, tuple[StateKind, ...]]]:
    """Enter an evaluation, or with `running` a generation, of a policy with a teacher; returns the
    calls of the backend."""
    fit, backend = on_accelerator(words, memory), Recording()
    hooks, _ = build_gateways(backend)
    assert isinstance(fit.rehearsed, Rehearsed)
    policy = fit.rehearsed.policy
    plan: Any = attrs.evolve(policy.plan, offload_states=mode)
    roles: Any = {
        name: attrs.evolve(policy, engine=name, plan=plan) for name in ("policy", "teacher")
    }
    phases = Phases(roles, Mesh(), hooks, fit)
    engine: Any = running
    for _ in range(times):
        with phases("evaluation" if running is None else "generation", running=engine):
            backend.calls.append(("inside", None, ()))
    return backend.calls


def test_auto_moves_states_only_where_a_phase_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = small_run(tmp_path)
    assert enter(words, 2**30, "auto") == [("inside", None, ())]
    assert capsys.readouterr().out == ""
    moved = [("offload", "policy", TRAINING), ("offload", "teacher", TRAINING)]
    back = [("reload", "policy", TRAINING), ("reload", "teacher", TRAINING)]
    assert enter(words, 2**10, "auto", times=2) == 2 * [*moved, ("inside", None, ()), *back]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "offload    evaluation: 2.0 GiB of states moved to the host, since it would "
    )


def test_a_phase_within_a_phase_moves_what_is_left(tmp_path: Path) -> None:
    fit, backend = on_accelerator(small_run(tmp_path), 2**30), Recording()
    hooks, _ = build_gateways(backend)
    assert isinstance(fit.rehearsed, Rehearsed)
    policy = fit.rehearsed.policy
    plan: Any = attrs.evolve(policy.plan, offload_states="always")
    roles: Any = {
        name: attrs.evolve(policy, engine=name, plan=plan) for name in ("policy", "teacher")
    }
    phases = Phases(roles, Mesh(), hooks, fit)
    engine: Any = "policy"
    with phases("evaluation"):
        del backend.calls[:]
        with phases("generation", running=engine):
            pass
        moved = [call for call in backend.calls if call[2]]
        assert moved == [
            ("offload", "teacher", ("weights",)),
            ("reload", "teacher", ("weights",)),
        ]
        del backend.calls[:]
    back = [("reload", "policy", TRAINING), ("reload", "teacher", TRAINING)]
    assert backend.calls == back


@pytest.mark.parametrize(("mode", "moves"), [("never", False), ("always", True)])
def test_a_mode_that_is_set_does_not_need_the_memory(
    tmp_path: Path, mode: str, moves: bool
) -> None:
    for memory in (2**10, 2**30):
        assert (len(enter(small_run(tmp_path), memory, mode)) > 1) == moves


def test_engines_that_do_not_run_give_their_weights_too(tmp_path: Path) -> None:
    calls = enter(small_run(tmp_path), 2**30, "always", running="policy")
    assert calls[:2] == [
        ("offload", "policy", TRAINING),
        ("offload", "teacher", (*TRAINING, "weights")),
    ]


def test_states_stay_on_the_host_after_an_error(tmp_path: Path) -> None:
    fit, backend = on_accelerator(small_run(tmp_path), 2**30), Recording()
    hooks, _ = build_gateways(backend)
    assert isinstance(fit.rehearsed, Rehearsed)
    policy = fit.rehearsed.policy
    plan: Any = attrs.evolve(policy.plan, offload_states="always")
    roles: Any = {"policy": attrs.evolve(policy, engine="policy", plan=plan)}
    with (
        pytest.raises(torch.OutOfMemoryError),
        Phases(roles, Mesh(), hooks, fit)("evaluation"),
    ):
        raise torch.OutOfMemoryError
    assert [call for call, *_ in backend.calls] == ["offload"]


def test_a_backend_without_the_hooks_moves_nothing() -> None:
    hooks, _ = build_gateways(PlainBackend())
    engine: Any = None
    assert hooks.offload_states(engine=engine, kinds=TRAINING) == 0
    assert hooks.reload_states(engine=engine, kinds=TRAINING)
