"""Several trained models in one run, and modules that are no language models: the same on any ranks
and stages, resumed to the last bit, exported by role."""

import contextlib
import io
import itertools
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForSequenceClassification

import sft_runs
from rlhf.commands.main import main
from rlhf.engine import Mesh
from rlhf.memory.rehearsal import Rehearsed
from rlhf.registry.gateway import load_hooks
from rlhf.request.reader import Request, read_config
from rlhf.train import rank as rank_run
from rlhf.train.dataset import prepare_data
from rlhf.train.exporting import export_checkpoint
from rlhf.train.rank import run_rank
from rlhf.train.session import Session
from rlhf.train.set_up import step_fit
from rlhf_devkit import Ranks, column, without_timings
from rlhf_devkit.curves import training
from rlhf_devkit.plain import PlainBackend
from rlhf_tools.plan import checkpoint_bytes
from role_trainers import Bigrams
from sft_runs import Inputs

STAGES = {
    "0": ("--deepspeed.stage", "0"),
    "2": ("--deepspeed.stage", "2", "--batch.tokens", "64"),
    "3": (
        *("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0"),
        *("--deepspeed.frozen", "3"),
    ),
}
CASES = {
    "CriticTrainer": ("loss", "grad_norm", "critic/grad_norm", "error", "learning_rate"),
    "BigramTrainer": ("loss", "grad_norm", "learning_rate"),
    "OrdinalTrainer": ("loss", "grad_norm", "learning_rate"),
}
"""What is compared, by trainer."""
LENGTH = ("--train.steps", "8", "--checkpoint.every", "4")


def role_request(trainer: str, words: list[str], cache: str) -> Request:
    """The request of a trainer of this folder under SFT's name and section."""
    os.environ["RLHF_CACHE"] = cache
    request = read_config("sft", overrides=words)
    plugin = attrs.evolve(request.plugin, trainer=f"role_trainers:{trainer}")
    return attrs.evolve(request, plugin=plugin)


def run(trainer: str, words: list[str], cache: str, plain: bool = False) -> list[dict[str, Any]]:
    """A run of a trainer of this folder under SFT's name and section."""
    request = role_request(trainer, words, cache)
    _, ended = run_rank(request, backend=PlainBackend() if plain else None)
    assert ended in ("done", "stop_at")
    return sft_runs.read_metrics(Path(request.config.output or ""))


def files(folder: Path) -> dict[str, bytes]:
    """The exported weights of every trained model."""
    paths = (path for name in folder.glob("model*") for path in name.rglob("*.safetensors"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


QUICK = {("CriticTrainer", "2"), ("BigramTrainer", "0"), ("OrdinalTrainer", "3")}


@pytest.fixture(scope="module")
def plain_curve(
    inputs: Inputs, one: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Any]]]:
    """A function that returns the curve of a trainer in plain torch."""

    @cache
    def curve(trainer: str) -> list[dict[str, Any]]:
        words = sft_runs.words(inputs, tmp_path_factory.mktemp("plain") / "run", *LENGTH)
        return one.run(run, trainer, words, str(inputs.cache), True)[0]

    return curve


@pytest.mark.parametrize(
    ("trainer", "stage"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.matrix])
        for case in itertools.product(CASES, STAGES)
    ],
)
def test_every_model_is_trained_as_in_plain_torch_and_resumed_to_the_last_bit(
    trainer: str,
    stage: str,
    plain_curve: Callable[[str], list[dict[str, Any]]],
    inputs: Inputs,
    two: Ranks,
    tmp_path: Path,
) -> None:
    def words(name: str, *more: str) -> list[str]:
        return sft_runs.words(inputs, tmp_path / name, *LENGTH, *more)

    rows, plain = str(inputs.cache), plain_curve(trainer)
    straight = two.run(run, trainer, words("straight", *STAGES[stage]), rows)[0]
    for name in CASES[trainer]:
        assert column(straight, name) == pytest.approx(column(plain, name), rel=1e-4, abs=1e-5)
    assert straight[-1]["eval/loss"] == pytest.approx(plain[-1]["eval/loss"], abs=1e-4)
    two.run(run, trainer, words("halves", *STAGES[stage], "--train.stop_at", "4"), rows)
    halves = two.run(run, trainer, words("halves", *STAGES[stage], "--resume"), rows)[0]
    assert without_timings(training(halves)) == without_timings(training(straight))
    assert halves[-1] == straight[-1]
    assert files(tmp_path / "halves") == files(tmp_path / "straight")


def test_a_critic_has_its_own_rate_and_is_exported_beside_the_policy(
    inputs: Inputs, two: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = sft_runs.words(inputs, folder, "--train.steps", "4", *STAGES["2"])
    metrics = two.run(run, "CriticTrainer", words, str(inputs.cache))[0]
    rates = zip(
        column(metrics, "critic/learning_rate"), column(metrics, "learning_rate"), strict=True
    )
    assert [low / high for low, high in rates] == pytest.approx([0.3] * 4)
    assert {path.name for path in (folder / "checkpoints" / "step-000004").iterdir()} >= {
        "policy",
        "critic",
    }
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "model-critic")
    assert critic.config.num_labels == 1
    before = files(folder)
    assert {*before} == {"model/model.safetensors", "model-critic/model.safetensors"}
    export_checkpoint(folder / "checkpoints" / "step-000004", folder)
    assert files(folder) == before
    target = tmp_path / "critic"
    assert main(["export", str(folder), str(target), "--role", "critic"]) == 0
    assert (target / "model.safetensors").read_bytes() == before["model-critic/model.safetensors"]
    assert main(["export", str(folder), str(tmp_path / "other"), "--role", "judge"]) == 2
    assert capsys.readouterr().err.endswith(
        f"error: {folder}/checkpoints/step-000004 has no model 'judge'; available: critic, policy\n"
    )
    assert not (tmp_path / "other").exists()


def checkpoint_sizes(trainer: str, words: list[str], cache: str) -> tuple[int, int, str]:
    """Set up a run. Returns the bytes of a checkpoint that it expects and those that `rlhf plan`
    prints, and the first lines of the run."""
    sizes: list[int] = []

    def carry_out(request: Request, session: Session, resumed: Path | None) -> str:
        sizes.append(session.checkpoint_bytes)
        return "done"

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.setattr(rank_run, "carry_out", carry_out)
        patch.setattr(rank_run, "report_on_demo", carry_out)
        request = role_request(trainer, words, cache)
        run_rank(request)
    fit = step_fit(request.config, prepare_data(request), Mesh(), load_hooks(request.config)[0])
    assert isinstance(fit.rehearsed, Rehearsed)
    return sizes[0], checkpoint_bytes(fit.rehearsed.run), text.getvalue()


@pytest.mark.parametrize(
    ("trainer", "more"),
    [
        ("CriticTrainer", ()),
        ("CriticTrainer", ("--lora.rank", "2")),
        ("AloneTrainer", ("--model.adapter", "ADAPTER")),
        ("MovingTrainer", ()),
        ("AverageTrainer", ("--model.dtype", "bf16")),
        ("AverageTrainer", ("--lora.rank", "2")),
        ("BigramTrainer", ("--lora.rank", "2")),
    ],
)
def test_the_plan_and_the_run_expect_checkpoints_of_one_size(
    trainer: str, more: tuple[str, ...], inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    if "ADAPTER" in more:
        words = sft_runs.words(inputs, tmp_path / "base", "--train.steps", "1", "--lora.rank", "2")
        one.run(sft_runs.run, words, str(inputs.cache))
        more = ("--model.adapter", str(tmp_path / "base" / "model"))
    words = sft_runs.words(inputs, tmp_path / "run", *more)
    ((expected, planned, _),) = one.run(checkpoint_sizes, trainer, words, str(inputs.cache))
    assert planned == pytest.approx(expected, rel=1e-3)


def test_a_run_prints_how_much_of_each_model_is_trained(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    def printed(*more: str) -> list[str]:
        words = sft_runs.words(inputs, tmp_path / "run", "--overwrite", *more)
        ((_, _, text),) = one.run(checkpoint_sizes, "CriticTrainer", words, str(inputs.cache))
        return [line for line in text.splitlines() if " parameters, " in line]

    policy, critic = printed()
    size = re.findall(r"([\d,]+) parameters", f"{policy} {critic}")
    assert policy == f"model      {inputs.model}: {size[0]} parameters, fp32"
    assert critic == f"critic     {size[1]} parameters, trained"
    policy, critic = printed("--lora.rank", "2")
    shares = re.findall(r"([\d,]+) parameters, ([\d,]+) trained", f"{policy} {critic}")
    assert [int(part.replace(",", "")) for share in shares for part in share] == [
        30_080, 2_048, 30_144, 2_080,
    ]  # fmt: skip


def test_a_module_is_exported_as_its_state(inputs: Inputs, one: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = sft_runs.words(inputs, folder, "--train.steps", "2")
    one.run(run, "BigramTrainer", words, str(inputs.cache))
    saved = files(folder)
    assert {*saved} == {"model/model.safetensors"}
    weights = safetensors.torch.load(saved["model/model.safetensors"])
    module = Bigrams(len(weights["embed.weight"]))
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    assert not torch.equal(module.embed.weight, Bigrams(len(module.embed.weight)).embed.weight)
    target = tmp_path / "exported"
    assert main(["export", str(folder), str(target)]) == 0
    again = safetensors.torch.load((target / "model.safetensors").read_bytes())
    assert {n: v.tolist() for n, v in again.items()} == {n: v.tolist() for n, v in weights.items()}


REFUSED = {
    "RoundedCriticTrainer": "a model of the trainer has optim.states bf16, but those of the run "
    "are fp32; all trained models use optim.states of the configuration",
    "TangledTrainer": "TangledTrainer.loss() returned a term of 'critic' that depends on the "
    "weights of 'policy'; detach what it uses of them, or prepare both as one module",
    "BrokenCriticTrainer": ": no weight of the critic was changed; look at these rows, or lower "
    "optim.lr",
    "ForgetfulTrainer": "ForgetfulTrainer.loss() returned terms for policy, but the run trains "
    "critic and policy; return a term for each of them",
}


@pytest.mark.parametrize("trainer", REFUSED)
def test_a_loss_of_another_model_or_none_is_refused(
    trainer: str, inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    (error,) = one.errors(run, trainer, sft_runs.words(inputs, tmp_path / "run"), str(inputs.cache))
    assert REFUSED[trainer] in error


def test_a_gradient_flows_through_a_frozen_model_that_is_not_in_shards(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    def words(name: str, *more: str) -> list[str]:
        return sft_runs.words(inputs, tmp_path / name, "--train.steps", "2", *more)

    plain = one.run(run, "JudgedTrainer", words("plain"), str(inputs.cache), True)[0]
    whole = words("whole", *STAGES["3"], "--deepspeed.frozen", "0")
    metrics = one.run(run, "JudgedTrainer", whole, str(inputs.cache))[0]
    assert column(metrics, "grad_norm") == pytest.approx(column(plain, "grad_norm"), rel=1e-4)
    assert min(column(metrics, "grad_norm")) > 0
    (error,) = one.errors(run, "JudgedTrainer", words("shards", *STAGES["3"]), str(inputs.cache))
    assert (
        "a gradient flows through the judge, which is frozen and in shards; detach what the "
        "trainer passes to it, or set deepspeed.frozen to 0"
    ) in error
