"""The engine `embedded` writes what a plain forward of the model gives token by token."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from attrs import evolve
from transformers import AutoModelForCausalLM

from rlhf.engine import Axis, Mesh
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.trainer import Sample
from rlhf_devkit.families import FAMILIES, VOCABULARY, llama
from rlhf_rollouts.cache import RowCache, RowLayer
from rlhf_rollouts.embedded import Embedded, rows_that_fit
from rlhf_rollouts.graphs import Graphs
from rlhf_rollouts.noise import draw, seed_tensor

ENDS = [5, 6, 7]
NEW = 12
CPU = torch.device("cpu")
PROMPTS = [
    torch.randint(8, VOCABULARY, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    for size in (7, 12, 1, 20, 9)
    for _ in range(2)
]
"""Two equal ones of each length; three are longer than the window."""


def engine_of(causal: Any) -> Any:
    """An engine whose module has what generation needs of a PackedModel."""
    module = llama()
    module.model = causal.eval()
    return SimpleNamespace(module=module, device=CPU, precision="fp32", sharded=False)


def writer(budget: int = 512) -> Any:
    hooks: Any = SimpleNamespace(generation_context=lambda engine: nullcontext())
    config: Any = SimpleNamespace(batch=SimpleNamespace(budget=budget))
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    return Embedded(config=config, tokenizer=tokenizer, mesh=Mesh(), hooks=hooks)


def answers(
    engine: Any, places: list[int], writer: Any, temperature: float = 1.0, most: int = 25
) -> list[Sample]:
    """The answers to some of the prompts, each with its own seed."""
    samples: list[Sample] = writer.sample(
        engine, [PROMPTS[place] for place in places], seeds=[40 + place for place in places],
        max_new_tokens=NEW, max_tokens=most, ends=ENDS, temperature=temperature,
    )  # fmt: skip
    return samples


def plain(causal: Any, place: int, temperature: float, most: int = 25) -> Sample:
    """The same answer by forwards without a cache."""
    prompt = PROMPTS[place]
    tokens: list[int] = []
    logprobs: list[float] = []
    room = max(1, min(NEW, most - len(prompt)))
    while len(tokens) < room and not (tokens and tokens[-1] in ENDS):
        with torch.no_grad():
            logits = causal(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
        drawn, known = draw(
            logits[:, -1], seed_tensor([40 + place], CPU), torch.tensor([len(tokens)]),
            temperature=temperature,
        )  # fmt: skip
        tokens.append(int(drawn))
        logprobs.append(known.item())
    return Sample(tokens, logprobs, finished=tokens[-1] in ENDS)


def assert_same(written: list[Sample], expected: list[Sample], *, within: float) -> None:
    for sample, other in zip(written, expected, strict=True):
        assert sample.tokens == other.tokens
        assert sample.finished == other.finished
        assert sample.logprobs == pytest.approx(other.logprobs, abs=within)


def assert_plain(causal: Any, written: list[Sample], temperature: float = 1.0) -> None:
    """Compare answers to all prompts with those of plain forwards. Scans in chunks are less exact
    than steps."""
    assert_same(
        written, [plain(causal, place, temperature) for place in range(len(PROMPTS))], within=2e-3
    )


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            name,
            marks=() if name in ("Qwen2", "Qwen3.5", "Falcon-H1") else pytest.mark.matrix,
        )
        for name in FAMILIES
        if name not in ("RecurrentGemma", "GLM 5", "Inkling")
    ],
)
def test_rows_write_what_a_plain_forward_of_the_family_gives(family: str) -> None:
    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    causal = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))
    embedded = writer()
    assert_plain(causal, answers(engine_of(causal), [*range(10)], embedded))
    assert embedded.notes == []


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_answer_depends_only_on_its_prompt_and_seed(temperature: float) -> None:
    engine = engine_of(llama().causal)
    together = answers(engine, [*range(10)], writer(), temperature)
    assert_plain(engine.module.causal, together, temperature)
    # Two rows, which begin several answers one after the other.
    in_turn = answers(engine, [*range(10)], writer(64), temperature)
    assert_same(in_turn, together, within=1e-5)
    some = answers(engine, [8, 3, 5], writer(), temperature)
    assert_same(some, [together[place] for place in (8, 3, 5)], within=1e-5)


def forwards(engine: Any, places: list[int], budget: int) -> list[tuple[int, int]]:
    """The shapes of the tokens that forwards read after the probe's."""
    embedded = writer(budget)
    answers(engine, [2], embedded)
    seen: list[tuple[int, int]] = []
    handle = engine.module.causal.register_forward_pre_hook(
        lambda module, inputs, options: seen.append(tuple(options["input_ids"].shape)),
        with_kwargs=True,
    )
    written = answers(engine, places, embedded)
    handle.remove()
    assert len(written) == len(places)
    return seen


def test_a_prompt_is_computed_once_for_its_answers() -> None:
    engine = engine_of(llama().causal)
    prompts, *steps = forwards(engine, [0, 0, 1, 1, 2, 2], 512)
    # Prompts 0 and 1 are the same, and 2 has 12 tokens; the first step reads the last one.
    assert prompts == (2, 11)
    assert set(steps) == {(6, 1)}


def test_rows_whose_answers_have_ended_begin_waiting_ones() -> None:
    engine = engine_of(llama().causal)
    seen = forwards(engine, [*range(10)], 32 * 4)
    steps = [shape for shape in seen if shape == (4, 1)]
    sizes = [len(sample.tokens) for sample in answers(engine, [*range(10)], writer())]
    assert len(steps) < sum(sizes[place] for place in (0, 2, 4, 6, 8)) < sum(sizes)
    assert len(seen) > len(steps) + 3


def test_a_model_whose_cache_is_not_supported_writes_by_generate_with_a_note() -> None:
    kind, sizes = FAMILIES["GLM 5"]
    torch.manual_seed(0)
    causal = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))
    embedded = writer()
    assert_plain(causal, answers(engine_of(causal), [*range(10)], embedded))
    assert embedded.notes == [
        "rollouts   GlmMoeDsaForCausalLM writes by generate of transformers: it keeps "
        "DynamicIndexedLayer"
    ]


def test_a_model_that_rows_compute_otherwise_writes_by_generate_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    update = RowLayer.update

    def wrong(self: RowLayer, keys: torch.Tensor, values: torch.Tensor, *more: Any) -> Any:
        return update(self, keys, values.flip(-1), *more)

    monkeypatch.setattr(RowLayer, "update", lambda self, k, v, *_, **__: wrong(self, k, v))
    engine, embedded = engine_of(llama().causal), writer()
    assert_plain(engine.module.causal, answers(engine, [*range(10)], embedded))
    (note,) = embedded.notes
    assert note.startswith(
        "rollouts   LlamaForCausalLM writes by generate of transformers: its steps were off by "
    )


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
    "original_max_position_embeddings": 16, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(("rope", "most"), [(LONGROPE, 64), (DYNAMIC, 16)])
def test_an_answer_does_not_depend_on_the_longest_row(rope: dict[str, Any], most: int) -> None:
    engine = engine_of(llama(rope_parameters=rope, max_position_embeddings=most).causal)
    engine.module.path = "separate"
    embedded = writer()
    together = answers(engine, [4, 6, 2, 7], embedded, most=35)
    alone = [answers(engine, [place], writer(), most=35)[0] for place in (4, 6, 2, 7)]
    assert_same(together, alone, within=1e-5)
    assert embedded.notes == [
        "rollouts   LlamaForCausalLM writes one answer at a time by generate of transformers, "
        "since its attention path is separate"
    ]


def test_without_prompts_there_are_no_answers() -> None:
    assert answers(engine_of(llama().causal), [], writer()) == []


@pytest.mark.parametrize("before", [False, True])
def test_logits_that_are_not_finite_are_an_error(before: bool) -> None:
    engine, embedded = engine_of(llama().causal), writer()
    if before:
        # Then rows write, else `generate`.
        answers(engine, [2], embedded)
    engine.module.causal.lm_head.weight.data[3] = torch.nan
    with pytest.raises(SameOnAllRanks) as error:
        answers(engine, [0, 2], embedded)
    assert str(error.value) == (
        "the logits of LlamaForCausalLM are not finite in fp32, so no answer can be drawn from "
        "them; lower optim.lr, or start from another checkpoint"
    )


def test_with_sharded_weights_an_attention_that_cannot_be_replaced_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, embedded = engine_of(llama().causal), writer()
    engine.sharded = True

    def refuse(name: str) -> None:
        raise ValueError("not this one")

    monkeypatch.setattr(engine.module.causal, "set_attn_implementation", refuse)
    assert_plain(engine.module.causal, answers(engine, [*range(10)], embedded))
    assert embedded.notes == [
        "rollouts   LlamaForCausalLM writes by generate of transformers: ValueError: not this one"
    ]


def test_with_sharded_weights_a_forward_that_fails_in_rows_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: RowLayer, *more: Any, **options: Any) -> Any:
        raise TypeError("not these keys")

    monkeypatch.setattr(RowLayer, "update", refuse)
    engine, embedded = engine_of(llama().causal), writer()
    engine.sharded = True
    with pytest.raises(RLHFError) as error:
        answers(engine, [0], embedded)
    assert str(error.value) == (
        "LlamaForCausalLM fails with TypeError: not these keys when it writes answers in rows, and "
        "weights divided among ranks rule out another try; choose another rollouts.engine"
    )


def test_rows_that_fit_are_a_power_of_two() -> None:
    found = [rows_that_fit(memory, 10) for memory in (0, 9, 10, 39, 40, 79, 1290)]
    assert found == [0, 0, 1, 2, 4, 4, 128]


def test_nothing_keeps_the_rows_of_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[RowCache]] = []
    begin = RowCache.__init__

    def watched(self: RowCache, *sizes: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *sizes)

    monkeypatch.setattr(RowCache, "__init__", watched)
    gc.disable()
    try:
        answers(engine_of(llama().causal), [0, 2], writer())
        # The probe's rows and those of the answers.
        assert [rows() for rows in made] == [None, None]
    finally:
        gc.enable()


class Device:
    """What graphs ask of a device, one that cannot capture."""

    called: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        if name == "capture_begin":
            raise RuntimeError("operation not permitted\nmore")
        return lambda *_, **__: nullcontext() if name == "stream" else Device()


def test_a_step_that_cannot_be_captured_runs_without_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device())
    ran: list[int] = []
    graphs = Graphs(CPU, Device())
    for _ in range(3):
        graphs.run(256, lambda: ran.append(1))
    assert len(ran) == 3
    assert graphs.failure == "operation not permitted"


def test_captures_have_one_stream_and_a_model_that_failed_is_not_captured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device())
    monkeypatch.setattr("rlhf_rollouts.embedded.captures", lambda device: True)
    monkeypatch.setattr(Device, "called", [])
    embedded = writer()
    for engine in [engine_of(llama().causal) for _ in range(2)]:
        for _ in range(2):
            answers(engine, [0, 2], embedded)
    assert Device.called.count("Stream") == 1
    assert Device.called.count("capture_begin") == 2
    assert embedded.notes == ["rollouts   its steps run without graphs (operation not permitted)"]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(tensor=Axis(size=2)), {}),
        (Mesh(), {"rope_parameters": LONGROPE}),
        (Mesh(), {"rope_parameters": DYNAMIC}),
    ],
)
def test_forwards_that_wait_are_not_captured(
    mesh: Mesh, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device())
    monkeypatch.setattr("rlhf_rollouts.embedded.captures", lambda device: True)
    monkeypatch.setattr(Device, "called", [])
    answers(engine_of(llama(**options).causal), [0, 2], evolve(writer(), mesh=mesh))
    assert "capture_begin" not in Device.called
