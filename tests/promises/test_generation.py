"""Sampled answers: they end where trained ones do, on ranks that end at different lengths too."""

import functools
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    PretrainedConfig,
)

import sft_runs
from rlhf.config.sections import BatchConfig, DataConfig
from rlhf.launch.places import Marker
from rlhf.registry.gateway import load_hooks
from rlhf.request.reader import read_config
from rlhf.train.dataset import prepare_data
from rlhf.train.set_up import set_up
from rlhf.trainer import Sample
from rlhf_devkit import layouts
from rlhf_devkit.ranks import Ranks
from sft_runs import Inputs

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|system|>{{ '\n' }}{% endfor %}"
"""A template that, like ChatML on a base model, ends turns with a token that is not EOS."""
BEGIN, EOS, END = 1, 2, 5
CHAIN = (20, 21, 22, 23, 24, 25, END, 40, BEGIN)


@pytest.fixture(scope="module")
def chained(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words of a run whose model writes the tokens of CHAIN in this order, and the last one
    forever."""
    folder = tmp_path_factory.mktemp("generation")
    model: Any = LlamaForCausalLM.from_pretrained(inputs.model)
    model.config.tie_word_embeddings = False
    table = model.model.embed_tokens.weight.detach()
    unit = torch.nn.functional.normalize(table, dim=1)
    head = torch.zeros_like(table)
    for token, following in zip(CHAIN, [*CHAIN[1:], CHAIN[-1]], strict=True):
        head[following] += unit[token]
    model.lm_head.weight = torch.nn.Parameter(head)
    for layer in model.model.layers:
        # Hidden states are then the embeddings.
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    for file in inputs.model.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    model.config.use_cache = False  # As other trainers leave it behind.
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    (folder / "turns.jinja").write_text(TURNS)
    template = str(folder / "turns.jinja")
    return sft_runs.words(
        inputs, folder / "run", "--model", str(folder), "--data.chat_template", template
    )


def draws(
    words: list[str],
    cache: str,
    prompts: list[list[int]],
    tokens: int,
    temperature: float = 0.0,
    max_tokens: int = 4096,
    max_new_tokens: int = 9,
) -> list[Sample]:
    """Answers of an engine of the run."""
    os.environ["RLHF_CACHE"] = cache
    request = read_config("sft", overrides=words)
    hooks, observers = load_hooks(request.config)
    data = prepare_data(request)
    mesh = hooks.setup_mesh(config=request.config)
    output = Path(request.config.output or "")
    session = set_up(request, data, mesh, hooks, observers, output, None, Marker(None, 0))
    config = attrs.evolve(
        request.config, batch=BatchConfig(tokens=tokens), data=DataConfig(max_tokens=max_tokens)
    )
    run: Any = session.sample
    drawn = attrs.evolve(run.__self__, config=config).sample(
        session.engine, prompts,
        seeds=range(len(prompts)), max_new_tokens=max_new_tokens, temperature=temperature,
    )  # fmt: skip
    hooks.close_mesh(mesh=mesh)
    return drawn


def answers(
    words: list[str], cache: str, prompts: list[list[int]], tokens: int, *limits: int
) -> list[list[int]]:
    """The most likely answers."""
    return [drawn.tokens for drawn in draws(words, cache, prompts, tokens, 0.0, *limits)]


def forward_logprobs(folder: str, rows: list[tuple[list[int], Sample]]) -> list[list[float]]:
    """Log-probabilities of the answers at temperature 2, from a forward in plain transformers."""
    model = LlamaForCausalLM.from_pretrained(folder)
    logprobs = []
    for prompt, answer in rows:
        ids = torch.tensor([[*prompt, *answer.tokens]])
        with torch.no_grad():
            every = (model(input_ids=ids).logits[0] / 2.0).log_softmax(-1)
        at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        logprobs.append(every[at, torch.tensor(answer.tokens)].tolist())
    return logprobs


PLACES = {
    **{name: layouts()[name] for name in ("stage 0", "stage 3")},
    "sequence axis": ("--deepspeed", "zero3", "--deepspeed.sequence_parallel", "2"),
    "tensor axis": ("--deepspeed", "zero2", "--deepspeed.tensor_parallel", "2"),
    **{preset: ("--deepspeed", preset) for preset in ("zero1", "zero2_offload", "zero3_offload")},
    "second copy": ("--deepspeed", "zero3", "--deepspeed.hpz_partition_size", "2"),
}
QUICK = ("stage 3", "tensor axis")


@pytest.mark.parametrize(
    "place",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in PLACES],
)
def test_ranks_sample_together_though_answers_end_at_different_lengths(
    place: str, inputs: Inputs, chained: list[str], two: Ranks
) -> None:
    # Two prompts fit into 26 tokens, so rank 0 has two groups and rank 1 has one.
    prompts = [[9, 9, 9, 20], [9, 9, 22], [9, 24], [25], [40]]
    expected = [[21, 22, 23, 24, 25, END], [23, 24, 25, END], [25, END], [END], [BEGIN] * 9]
    words = [*chained, *PLACES[place]]
    assert two.run(answers, words, str(inputs.cache), prompts, 26) == [expected] * 2


def warnings_while_answering(words: list[str], cache: str, prompt: list[int]) -> list[str]:
    """What transformers warns of while it writes the answer to one prompt."""
    said: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return True

    logger = logging.getLogger("transformers.generation.stopping_criteria")
    logger.addFilter(note)
    answers(words, cache, [prompt], 2048)
    logger.removeFilter(note)
    return said


def test_an_answer_past_the_context_is_not_a_warning_of_transformers(
    inputs: Inputs, chained: list[str], one: Ranks
) -> None:
    positions = LlamaConfig.from_pretrained(inputs.model).max_position_embeddings
    prompt = [*[9] * positions, 22]
    assert one.run(warnings_while_answering, chained, str(inputs.cache), prompt) == [[]]


def test_an_answer_ends_with_the_trained_turn_though_it_is_not_eos(
    inputs: Inputs, chained: list[str], one: Ranks
) -> None:
    (found,) = one.run(answers, chained, str(inputs.cache), [[9, 24], [25]], 512)
    assert found == [[25, END], [END]]


def test_the_distribution_is_the_model_s_own_whatever_its_folder_wants_of_generation(
    inputs: Inputs, chained: list[str], one: Ranks, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(Path(chained[chained.index("--data.chat_template") + 1]).parent, folder)
    wanted = {
        "suppress_tokens": [25], "forced_bos_token_id": 40, "min_new_tokens": 7, "penalty_alpha": 1,
        "stop_strings": ["2"], "token_healing": True, "return_dict_in_generate": True,
        "repetition_penalty": 9.0, "sequence_bias": [[[40], 99.0]], "do_sample": True,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(wanted))
    words = [*chained, "--model", str(folder)]
    (found,) = one.run(answers, words, str(inputs.cache), [[9, 24], [25]], 512)
    assert found == [[25, END], [END]]


@pytest.mark.parametrize("layout", [pytest.param("stage 0", marks=pytest.mark.matrix), "stage 3"])
def test_each_answer_ends_where_it_has_the_most_tokens_with_its_prompt(
    layout: str, inputs: Inputs, chained: list[str], two: Ranks
) -> None:
    prompts = [[9, 9, 9, 40], [9, 9, 22], [9] * 7 + [40], [40], [9] * 8 + [40]]
    expected = [[BEGIN] * 4, [23, 24, 25, END], [BEGIN], [BEGIN] * 7, [BEGIN]]
    words = [*chained, *PLACES[layout]]
    for tokens in (36, 512):
        found = two.run(answers, words, str(inputs.cache), prompts, tokens, 8)
        assert found == [expected] * 2


TABLES: dict[str, Callable[[int], PretrainedConfig]] = {
    "gpt2": lambda size: GPT2Config(
        vocab_size=size, n_positions=80, n_embd=8, n_head=2, n_layer=1
    ),
    "opt": lambda size: OPTConfig(
        vocab_size=size, max_position_embeddings=80, hidden_size=8, num_attention_heads=2,
        num_hidden_layers=1, ffn_dim=8, word_embed_proj_dim=8, eos_token_id=EOS, pad_token_id=EOS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gpt2", "stage 0"),
        ("opt", "stage 3"),
        pytest.param("gpt2", "stage 3", marks=pytest.mark.matrix),
        pytest.param("opt", "stage 0", marks=pytest.mark.matrix),
    ],
)
def test_answers_of_any_group_end_with_the_table_of_positions(
    family: str, layout: str, inputs: Inputs, tmp_path: Path, two: Ranks
) -> None:
    for file in inputs.model.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(
        (inputs.model / "chat_template.jinja").read_bytes()
    )
    vocabulary = LlamaConfig.from_pretrained(inputs.model).vocab_size
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(TABLES[family](vocabulary))
    model.save_pretrained(tmp_path)
    words = sft_runs.words(
        inputs, tmp_path / "run", "--model", str(tmp_path), "--data.max_tokens", "80",
        *PLACES[layout],
    )  # fmt: skip
    prompts = [[9] * 80, [9] * 70, [9, 24], [25] * 40]
    together, by_itself = (
        two.run(answers, words, str(inputs.cache), prompts, tokens, 4096, 100)
        for tokens in (1024, 1)
    )
    assert together == by_itself
    assert [len(answer) for answer in together[0]] == [1, 10, 78, 40]


def lengths_seen(
    words: list[str], cache: str, prompts: list[list[int]], max_tokens: int = 4096
) -> list[int]:
    """How many tokens of each row the model's forwards see in a generation."""
    seen: list[int] = []
    forward = LlamaForCausalLM.forward

    def seeing(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        seen.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", functools.wraps(forward)(seeing))
        draws(words, cache, prompts, 512, 0.0, max_tokens)
    return seen


def test_keys_and_values_are_kept_though_the_model_says_not_to(
    inputs: Inputs, chained: list[str], one: Ranks
) -> None:
    (seen,) = one.run(lengths_seen, chained, str(inputs.cache), [[9, 9, 9, 22]])
    # Probes run before. The first step reads the last token of the prompt.
    assert seen[-5:] == [3, 1, 1, 1, 1]


def test_no_token_is_drawn_after_every_row_has_ended(
    inputs: Inputs, chained: list[str], one: Ranks
) -> None:
    prompts = [[9, 9, 9, 9, 40], [25]]
    (seen,) = one.run(lengths_seen, chained, str(inputs.cache), prompts, 8)
    assert seen[-4:] == [4, 1, 1, 1]


def test_an_answer_has_the_log_probabilities_of_its_tokens_at_the_temperature_of_the_draw(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    prompts = [[9, 9, 9, 20], [9, 24], [25]]
    words = sft_runs.words(inputs, tmp_path, *layouts()["stage 3"])
    found, other = two.run(draws, words, str(inputs.cache), prompts, 26, 2.0)
    assert found == other
    assert [len(answer.logprobs) for answer in found] == [len(answer.tokens) for answer in found]
    expected = forward_logprobs(str(inputs.model), list(zip(prompts, found, strict=True)))
    assert [answer.logprobs for answer in found] == [
        pytest.approx(row, abs=1e-5) for row in expected
    ]
