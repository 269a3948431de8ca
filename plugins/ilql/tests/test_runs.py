"""Runs whose target heads follow, and what their exported models write."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf.errors import RLHFError
from rlhf.readouts import exported_extra, exported_model
from rlhf_devkit import make_model, shared, tiny
from rlhf_plugin_ilql.generation import Guided

STAGE_3 = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")
CASES = {
    "one rank, LoRA": (1, ("--deepspeed.stage", "0", "--lora.rank", "4")),
    "stage 3, LoRA": (2, (*STAGE_3, "--lora.rank", "4")),
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line of a tiny run whose targets move."""
    words = tiny.short_run(tmp_path_factory.mktemp("ilql"), "rewarded")
    return [*words, "--ilql.steps_for_target_q_sync", "1"]


def extra_after(words: list[str], world: int, folder: Path) -> Mapping[str, Tensor]:
    shared(world).run(tiny.run, "ilql", [*words, "--output", str(folder)], f"{folder}-cache")
    return exported_extra(folder / "model")


@pytest.mark.parametrize("name", CASES)
def test_targets_beside_an_adapter_are_saved_resumed_and_exported(
    name: str, words: list[str], tmp_path: Path
) -> None:
    world, more = CASES[name]
    copied = extra_after([*words, *more, "--ilql.alpha", "1"], world, tmp_path / "copied")
    assert torch.equal(copied["target_q0_out_weight"], copied["q0_out_weight"])
    given = [*words, *more, "--ilql.alpha", "0.3"]
    straight = extra_after(given, world, tmp_path / "straight")
    assert not torch.equal(straight["target_q0_out_weight"], straight["q0_out_weight"])
    halves = tmp_path / "halves"
    extra_after([*given, "--train.stop_at", "2"], world, halves)
    resumed = extra_after([*given, "--resume"], world, halves)
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[key], value) for key, value in straight.items())


def test_answers_follow_the_logits_with_the_advantages_added(
    words: list[str], tmp_path: Path
) -> None:
    extra = extra_after([*words, "--optim.lr", "3e-2"], 1, tmp_path / "run")
    folder = tmp_path / "run" / "model"
    guided, model = Guided(folder), exported_model(folder, "causal").eval()
    prompts = torch.tensor([[21, 17, 22, 40], [30, 31, 22, 40]])
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(prompts, **options)
    assert torch.equal(guided.generate(prompts, beta=0.0, **options), plain)

    def head(name: str, states: Tensor) -> Tensor:
        inner = (states @ extra[f"{name}_in_weight"].T + extra[f"{name}_in_bias"]).relu()
        return inner @ extra[f"{name}_out_weight"].T + extra[f"{name}_out_bias"]

    rows = prompts
    with torch.no_grad():
        for _ in range(6):
            out = model(input_ids=rows, output_hidden_states=True)
            states = out.hidden_states[-1][:, -1]
            q = torch.minimum(head("target_q0", states), head("target_q1", states))
            scores = out.logits[:, -1] + 5.0 * (q - head("v", states))
            rows = torch.cat([rows, scores.argmax(-1, keepdim=True)], 1)
    found = guided.generate(prompts, beta=5.0, **options)
    assert not torch.equal(found, plain)
    end = guided.tokenizer.eos_token_id
    for one, other in zip(found.tolist(), rows.tolist(), strict=True):
        # transformers pads after the end.
        size = one.index(end) if end in one else len(one)
        assert one[:size] == other[:size]


@pytest.fixture(scope="module")
def exported(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder of a short run."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    extra_after(words, 1, folder)
    return folder / "model"


def test_answers_to_prompts_of_different_lengths_are_those_of_each_alone(exported: Path) -> None:
    guided = Guided(exported)
    prompts = ["1 + 2 =", "10 + 20 + 30 ="]
    options = {"beta": 3.0, "max_new_tokens": 5, "do_sample": False}
    together = guided.answers(prompts, **options)
    assert together == [guided.answers([prompt], **options)[0] for prompt in prompts]


@pytest.mark.parametrize(
    "lora", [(), pytest.param(("--lora.rank", "4"), marks=pytest.mark.matrix)], ids=str
)
def test_the_generation_config_of_the_model_does_not_change_the_distribution(
    lora: tuple[str, ...], words: list[str], tmp_path: Path
) -> None:
    extra_after([*words, *lora], 1, tmp_path / "run")
    guided = Guided(tmp_path / "run" / "model")
    prompts, options = ["1 + 2 =", "10 + 20 + 30 ="], {"beta": 3.0, "max_new_tokens": 8}
    expected = guided.answers(prompts, do_sample=False, **options)
    own = guided.model.generation_config
    own.update(repetition_penalty=5.0, do_sample=True, temperature=9.0, suppress_tokens=[3, 5])
    assert guided.answers(prompts, **options) == expected
    assert guided.model.generation_config.repetition_penalty == 5.0


def test_prompts_need_no_padding_token(exported: Path) -> None:
    guided, prompts = Guided(exported), ["1 + 2 =", "10 + 20 + 30 ="]
    options = {"beta": 3.0, "max_new_tokens": 5, "do_sample": False}
    expected = guided.answers(prompts, **options)
    guided.tokenizer.pad_token = guided.model.generation_config.pad_token_id = None
    assert guided.answers(prompts, **options) == expected


def test_a_prompt_without_tokens_is_refused(exported: Path) -> None:
    with pytest.raises(RLHFError) as error:
        Guided(exported).answers(["1 + 2 =", ""])
    assert str(error.value) == "prompts[1] has no tokens; write at least one word"


def test_a_folder_without_heads_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    with pytest.raises(RLHFError) as error:
        Guided(folder)
    assert str(error.value) == (
        f"{folder} has no Q heads; pass the model/ folder of a run of `rlhf run ilql`"
    )
