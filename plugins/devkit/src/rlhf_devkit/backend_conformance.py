"""The tests that every backend must pass, as a class to subclass in a test file.

    class TestMine(BackendConformance):
        backend = "mine"

They run a problem of a few parameters (`rlhf_devkit.problem`) under every layout that the record
calls `tested`, on ranks of `rlhf_devkit.ranks.shared`, and compare it with plain torch.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import define, field, frozen
from safetensors.torch import load_file
from torch import Tensor

from rlhf.config.field_docs import documented
from rlhf.engine import Layout
from rlhf.hookspecs import Finding
from rlhf.plugin import BackendPlugin, Config
from rlhf.registry.gateway import BackendGateway, build_backend, check_backend
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import find
from rlhf.request.settings_tree import to_tree
from rlhf.train.exporting import whole_weights, write_weights
from rlhf_devkit import tiny
from rlhf_devkit.bench import SEVERAL, Bench, words_of
from rlhf_devkit.curves import Metrics, column, same_curve, without_timings
from rlhf_devkit.curves import weights as exported_weights
from rlhf_devkit.once import Once
from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.problem import (
    Case,
    Outcome,
    configure,
    follow,
    load,
    losses,
    make_batch,
    shape,
)
from rlhf_devkit.promises import promise
from rlhf_devkit.ranks import shared

TRAINED = {"gradients", "masters", "optimizer", "buffers", "updating", "reducing"}
"""Parts of `estimate_memory` that only a trained model has."""
PARTS = {"weights", "host", "nvme"} | TRAINED
SHARE = 0.25
RUN = (
    "--train.eval_every", "2", "--train.eval_at_start", "true", "--train.samples", "1",
    "--checkpoint.every", "2", "--checkpoint.keep", "3",
)  # fmt: skip
"""Words of a run of four steps with all that happens between steps."""
EXPORTED = "model.safetensors"
BUCKET = 2048
"""Bytes of a bucket of weights: the problem has several."""


@frozen(kw_only=True)
class Seen:
    """One rank of a run of the problem."""

    outcome: Outcome
    place: dict[str, int]
    """Of this rank in the mesh."""
    plans: dict[str, dict[str, Any]]
    """By role."""
    facts: dict[str, Any]
    """What the policy's engine says of itself."""
    memory: dict[str, dict[str, int]]
    """By role."""
    frozen: dict[str, Any]
    """What happened to the frozen engine."""
    generation: dict[str, bool]
    layouts: Sequence[Layout]
    findings: Sequence[Finding]
    closed: bool


@define
class Problems:
    """Runs of the problem under one backend, those made so far by their arguments."""

    record: BackendPlugin
    folder: Path
    name: str = "tested"
    """What runs call the backend."""
    once: Once = field(factory=Once)

    def seen(self, layout: str, ranks: int) -> list[Seen]:
        """Return what each rank saw of four steps, with a frozen engine next to the policy."""
        folder = self._folder(layout, ranks, "seen")
        return self._once(see, self._case(layout, micro_batches=2), folder, ranks)

    def train(self, layout: str, ranks: int, name: str, **options: Any) -> tuple[Outcome, Any]:
        """Return the outcome and the exported weights of a run, made once by its `name`."""
        folder = self._folder(layout, ranks, name)
        outcomes = self._once(train, self._case(layout, **options), folder, ranks)
        return outcomes[0], load_file(folder / EXPORTED)

    def exported(self, layout: str, ranks: int, name: str) -> dict[str, Tensor]:
        """Return the weights that the run of `seen` exported under this name."""
        return load_file(self._folder(layout, ranks, "seen") / name / EXPORTED)

    def plain_run(self) -> Metrics:
        """Return the metrics of a real run in plain torch, made once."""
        return self._bench().plain()

    def run(self, layout: str, ranks: int) -> Metrics:
        """Return the metrics of a real run, made once."""
        return self._bench().run(self._run_name(layout, ranks), ranks, *self._words(layout))

    def resume(self, layout: str, ranks: int) -> Metrics:
        """Resume the run of `run` at its second step and return its metrics."""
        words = (*self._words(layout), "--resume", "step-000002")
        return self._bench().start(self._run_name(layout, ranks), ranks, *words)

    def run_weights(self, layout: str, ranks: int) -> dict[str, bytes]:
        """Return the bytes of the weights that the real run has exported."""
        return exported_weights(self.folder / "runs" / self._run_name(layout, ranks))

    def _run_name(self, layout: str, ranks: int) -> str:
        return f"of a trainer, {layout}, {ranks} ranks"

    def _words(self, layout: str) -> tuple[str, ...]:
        return words_of(self.name, self.record.tested[layout])

    def _bench(self) -> Bench:
        def make() -> Bench:
            folder = self.folder / "runs"
            folder.mkdir()
            words = [*tiny.short_run(folder, "demonstration"), *RUN]
            backend = (self.name, self.record)
            return Bench(SEVERAL, "several", folder, words, str(folder / "cache"), backend=backend)

        return self.once.get("the set-up of the runs of a trainer", make)

    def _case(self, layout: str, *, dtype: Any = "fp32", **options: Any) -> Case:
        section = self.record.config(**self.record.tested[layout])
        return Case(config=configure(section, dtype=dtype), **options)

    def _folder(self, layout: str, ranks: int, name: str) -> Path:
        return self.folder / f"{layout}, {ranks} ranks, {name}"

    def _once(self, function: Callable[..., Any], case: Case, folder: Path, ranks: int) -> Any:
        def make() -> Any:
            folder.mkdir()
            return shared(ranks).run(function, self.record.hooks, case, folder)

        return self.once.get(f"the run '{folder.name}'", make)


@documented
class BackendConformance:
    """The tests. A subclass names its backend."""

    backend: ClassVar[str] = ""
    """Name of the backend: that of its entry point."""
    record: ClassVar[BackendPlugin | None] = None
    """The record of a backend that is not installed."""
    ranks: ClassVar[Sequence[int]] = (1, 2)
    """Numbers of processes to run on, the largest last."""
    precisions: ClassVar[Sequence[str]] = ("fp32", "bf16")
    """The values of `model.dtype` that the backend has on a CPU; fp32 is one of them."""

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Give a test each layout, on the most ranks; the plainest layout on all numbers of
        ranks."""
        layouts, most = list(record_of(cls).tested), cls.ranks[-1]
        places = [(layouts[0], ranks) for ranks in cls.ranks[:-1]]
        places += [(layout, most) for layout in layouts]
        if "ranks" in metafunc.fixturenames:
            ids = [f"{layout} {ranks}" for layout, ranks in places]
            metafunc.parametrize(("layout", "ranks"), places, ids=ids)

    @pytest.fixture(scope="class")
    @classmethod
    def problems(cls, tmp_path_factory: pytest.TempPathFactory) -> Problems:
        """The runs of the class."""
        name = cls.backend or "tested"
        return Problems(record_of(cls), tmp_path_factory.mktemp("backend"), name)

    @pytest.fixture
    def seen(self, problems: Problems, layout: str, ranks: int) -> list[Seen]:
        """What each rank saw in this layout."""
        return problems.seen(layout, ranks)

    @promise("a backend implements each hook once", "hooks.md, Backend hooks")
    def test_every_hook_is_implemented(self) -> None:
        check_backend(load_object(record_of(type(self)).hooks)())

    @promise("a record imports neither torch nor its own backend", "testing.md, Backends")
    def test_the_record_imports_no_torch(self) -> None:
        if not self.backend:
            pytest.skip("this backend has no entry point")
        module = find("backend", self.backend).value.partition(":")[0]
        code = f"import sys, {module}; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
        assert not done.stderr, done.stderr
        assert done.stdout == "False\n", f"{module} imports torch"

    @promise("the ranks divide the rows, and each knows its place", "hooks.md, setup_mesh")
    def test_each_rank_has_its_place(self, seen: list[Seen], ranks: int) -> None:
        for rank, one in enumerate(seen):
            assert one.place == {"rank": rank, "world": ranks, "data": rank, "size": ranks}

    @promise("a plan is plain data, the same on all ranks", "hooks.md, configure_zero")
    def test_the_plan_is_plain_data(self, seen: list[Seen]) -> None:
        first, *others = seen
        assert json.loads(json.dumps(first.plans)) == first.plans
        assert all(other.plans == first.plans for other in others)
        said = {name: first.plans["policy"][name] for name in ("sharded", "precision")}
        assert first.facts == said | {"role": "policy"}, "the engine differs from its plan"

    @promise("a run calls the hooks in this order, with these modules", "hooks.md, Backend hooks")
    def test_a_run_of_a_trainer_is_that_of_plain_torch(
        self, problems: Problems, layout: str, ranks: int
    ) -> None:
        metrics, expected = problems.run(layout, ranks), problems.plain_run()
        same_curve(metrics, expected)
        norms = [column(each, "critic/grad_norm") for each in (metrics, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4), "the gradients of a module differ"

    @promise("a resumed run is the same to the last bit", "hooks.md, load_checkpoint")
    def test_a_run_of_a_trainer_resumes_to_the_last_bit(
        self, problems: Problems, layout: str, ranks: int
    ) -> None:
        straight = without_timings(problems.run(layout, ranks))
        weights = problems.run_weights(layout, ranks)
        resumed = without_timings(problems.resume(layout, ranks))
        assert resumed == straight, "the metrics differ"
        assert problems.run_weights(layout, ranks) == weights, "the exported weights differ"

    @promise("a frozen model has no gradients and no optimizer", "hooks.md, estimate_memory")
    def test_the_estimate_has_its_parts(self, seen: list[Seen]) -> None:
        for one in seen:
            policy, frozen = one.memory["policy"], one.memory["reference"]
            assert "weights" in policy.keys() & frozen.keys()
            assert policy.keys() | frozen.keys() <= PARTS
            assert not TRAINED & {name for name, size in frozen.items() if size}
            assert all(isinstance(size, int) and size >= 0 for size in policy.values())

    @promise("the curve does not depend on ranks and layout", "hooks.md, prepare")
    def test_the_steps_are_those_of_plain_torch(
        self, problems: Problems, seen: list[Seen], layout: str, ranks: int
    ) -> None:
        expected, _, weights = plain()
        for outcome in (one.outcome for one in seen):
            assert outcome.losses == pytest.approx(expected.losses, rel=1e-5), "the losses differ"
            assert outcome.norms == pytest.approx(expected.norms, rel=1e-4), (
                "the gradient norms, which are those before clipping, differ"
            )
            assert outcome.rates == pytest.approx(expected.rates), "the learning rates differ"
            assert all(outcome.moved), "a step moved no weight"
        same_weights(problems.exported(layout, ranks, "policy"), weights, atol=1e-5)

    @promise("a gradient that is not finite reaches no weight", "api.md, rlhf.engine")
    def test_a_gradient_that_is_not_finite_moves_nothing(
        self, problems: Problems, layout: str, ranks: int
    ) -> None:
        _, before = problems.train(layout, ranks, "one step", steps=1)
        poison = (1, ranks - 1)
        outcome, after = problems.train(layout, ranks, "poisoned", steps=2, poison=poison)
        assert outcome.moved == [True, False]
        same_weights(after, before)

    @promise("a resumed run is the same to the last bit", "hooks.md, load_checkpoint")
    def test_a_resumed_run_is_the_same(self, problems: Problems, layout: str, ranks: int) -> None:
        saved = problems.folder / f"saved {layout} {ranks}"
        saved.mkdir(exist_ok=True)
        straight, weights = problems.train(layout, ranks, "straight", save=(2, saved))
        resumed, others = problems.train(layout, ranks, "resumed", load=saved)
        assert resumed.losses == straight.losses[2:], "the losses differ"
        assert resumed.norms == straight.norms[2:], "the gradient norms differ"
        same_weights(others, weights)

    @promise("a checkpoint continues in any layout", "hooks.md, load_checkpoint")
    def test_a_checkpoint_continues_in_the_plainest_layout(
        self, problems: Problems, layout: str, ranks: int
    ) -> None:
        saved = problems.folder / f"moved {layout} {ranks}"
        saved.mkdir(exist_ok=True)
        straight, _ = problems.train(layout, ranks, "saves", save=(2, saved))
        plainest, fewest = next(iter(problems.record.tested)), self.ranks[0]
        resumed, _ = problems.train(plainest, fewest, f"from {layout} {ranks}", load=saved)
        assert resumed.losses == pytest.approx(straight.losses[2:], rel=1e-5)

    @promise("an engine without an optimizer takes no gradient", "hooks.md, prepare")
    def test_a_frozen_engine_takes_no_gradient(self, seen: list[Seen]) -> None:
        for one in seen:
            assert not one.frozen["has_graph"], "its output has a graph"
            assert not one.frozen["trainable"], f"{one.frozen['trainable']} require a gradient"
            first, last = one.frozen["losses"]
            assert first == last, "its loss changed while the policy was trained"

    @promise("weights are mixed by the share", "hooks.md, mix_weights")
    @pytest.mark.usefixtures("seen")
    def test_weights_are_mixed(self, problems: Problems, layout: str, ranks: int) -> None:
        before, policy, mixed = (
            problems.exported(layout, ranks, name) for name in ("reference", "trained", "mixed")
        )
        expected = {name: SHARE * policy[name] + (1 - SHARE) * before[name] for name in before}
        trained = {name for name in expected if "scale" not in name}  # A buffer is no weight.
        same_weights(
            {name: mixed[name] for name in trained},
            {name: expected[name] for name in trained},
            atol=1e-6,
        )

    @promise("states that left the device come back unchanged", "hooks.md, reload_states")
    def test_offloaded_states_come_back(self, problems: Problems, layout: str, ranks: int) -> None:
        stays, weights = problems.train(layout, ranks, "stays")
        moves, others = problems.train(layout, ranks, "moves", moves=True)
        assert moves == stays, "a run whose states move differs"
        same_weights(others, weights)

    @promise("generation runs in evaluation mode, without gradient", "hooks.md, generation_context")
    def test_generation_has_no_gradient(self, seen: list[Seen]) -> None:
        for one in seen:
            assert one.generation == {"training": False, "gradient": False, "after": True}

    @promise("layouts are ordered by their cost", "hooks.md, layouts")
    def test_the_layouts_can_be_compared(self, seen: list[Seen]) -> None:
        layouts = seen[0].layouts
        assert all(isinstance(item, Layout) for item in layouts)
        costs = [item.cost for item in layouts]
        assert costs == sorted(costs)
        assert all(isinstance(item.config, Config) for item in layouts)

    @promise("rlhf doctor can print what the machine has", "hooks.md, diagnose")
    def test_the_machine_is_diagnosed(self, seen: list[Seen]) -> None:
        assert all(isinstance(item, Finding) for item in seen[0].findings)

    @promise("the group ends, and another can begin", "hooks.md, close_mesh")
    def test_the_mesh_closes(self, seen: list[Seen]) -> None:
        assert all(one.closed is True for one in seen)

    @promise("a precision has its own weights and nearly the curve of fp32", "hooks.md, prepare")
    def test_every_precision_follows_the_curve(
        self, problems: Problems, layout: str, ranks: int
    ) -> None:
        expected, *_ = plain()
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        for dtype in self.precisions:
            outcome, weights = problems.train(layout, ranks, f"in {dtype}", dtype=dtype)
            assert outcome.losses == pytest.approx(expected.losses, rel=5e-3), f"{dtype}: the loss"
            found = {str(value.dtype) for name, value in weights.items() if "scale" not in name}
            assert found == {str(dtypes[dtype])}, f"{dtype}: the exported weights are {found}"


def record_of(kit: type[BackendConformance]) -> BackendPlugin:
    """Return the record of the backend that a subclass tests."""
    return kit.record or load_record(find("backend", kit.backend))


def plain() -> tuple[Outcome, Any, dict[str, Tensor]]:
    """Return the outcome, the engine and the weights of the problem in plain torch."""
    outcome, engine, _ = follow(PlainBackend(), Case(config=configure()))
    return outcome, engine, engine.module.state_dict()


def same_weights(
    weights: dict[str, Tensor], expected: dict[str, Tensor], *, atol: float = 0.0
) -> None:
    """Assert that exported weights are the expected ones; a tied one has one name in a file."""
    missing = expected.keys() - weights.keys() - {"model.head.weight", "model.embed.weight"}
    assert not missing, f"the export lacks {sorted(missing)}"
    for name in weights:
        same = torch.allclose(weights[name], expected[name], atol=atol, rtol=0.0)
        assert same, f"the weight {name} differs"


def train(hooks: str, case: Case, folder: Path) -> Outcome:
    """Run the problem on this rank and export its weights."""
    backend = gateway(hooks)
    outcome, engine, mesh = follow(backend, case)
    _export(backend, engine, mesh, folder)
    backend.close_mesh(mesh=mesh)
    return outcome


def see(hooks: str, case: Case, folder: Path) -> Seen:
    """Run the problem on this rank, with a frozen engine next to the policy."""
    backend = gateway(hooks)
    outcome, engine, mesh = follow(backend, case)
    _export(backend, engine, mesh, folder / "policy")
    arguments: dict[str, Any] = {"config": case.config, "mesh": mesh, "model_shape": shape()}
    plans, memory = {}, {}
    for role, trained in (("policy", True), ("reference", False)):
        plan = backend.configure_zero(**arguments, role=role, trained=trained, occupied=0)
        plans[role] = to_tree(plan)
        memory[role] = dict(backend.estimate_memory(**arguments, plan=plan, trained=trained))
    plan, module = load(backend, case, mesh, "reference", trained=False)
    backend.shard(model=module, plan=plan, mesh=mesh)
    reference = backend.prepare(
        model=module, optimizer=None, schedule=None, role="reference", plan=plan, mesh=mesh
    )
    frozen = _beside(engine, reference)
    engine.train()
    with backend.generation_context(engine=engine):
        generation = {"training": engine.module.training, "gradient": torch.is_grad_enabled()}
    generation["after"] = engine.module.training
    for name, source in (("trained", engine), ("reference", reference)):
        _export(backend, source, mesh, folder / name)
    names = {name: name for name, _ in reference.module.named_parameters()}
    backend.mix_weights(engine=reference, source=engine, share=SHARE, names=names)
    _export(backend, reference, mesh, folder / "mixed")
    return Seen(
        outcome=outcome,
        place={
            "rank": mesh.rank, "world": mesh.world, "data": mesh.data.rank, "size": mesh.data.size,
        },
        plans=plans,
        facts={name: getattr(engine, name) for name in ("sharded", "precision", "role")},
        memory=memory,
        frozen=frozen,
        generation=generation,
        layouts=backend.layouts(**arguments),
        findings=backend.diagnose(),
        closed=backend.close_mesh(mesh=mesh),
    )  # fmt: skip


def gateway(hooks: str) -> BackendGateway:
    """Return the backend behind core's gateway, which refuses a hook that returns None."""
    return build_backend(load_object(hooks)())


def _beside(policy: Any, reference: Any) -> dict[str, Any]:
    """Train the policy with its distance to the reference, and return what became of the
    latter."""
    batch = make_batch(0, range(4), reference.device)
    known = reference(batch, losses)["loss"]
    read = policy(batch, losses)["loss"]
    policy.backward((read - known).square().sum(), last=True)
    policy.step().read()
    again = reference(batch, losses)["loss"]
    named = reference.module.named_parameters()
    return {
        "has_graph": known.requires_grad,
        "trainable": [name for name, parameter in named if parameter.requires_grad],
        "losses": (known.tolist(), again.tolist()),
    }


def _export(backend: BackendGateway, engine: Any, mesh: Any, folder: Path) -> None:
    weights = whole_weights(backend, engine, keep=mesh.rank == 0, size=BUCKET)
    if mesh.rank == 0:
        folder.mkdir(exist_ok=True)
        write_weights(weights, engine.module, folder)
    mesh.barrier()
