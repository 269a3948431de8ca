"""The cache of the reference: its values, its parts on disk and what it depends on."""

import resource
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from pair_runs import Pairs, make_run, packed, write_inputs
from small_models import loaded_from_hub
from transformers import LlamaForCausalLM

from rlhf.config.sections import TrainConfig
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.data.examples import Examples, Packable
from rlhf.data.packing import pack
from rlhf.errors import RLHFError
from rlhf.readouts import token_logprobs
from rlhf.reference import compute, stored
from rlhf.reference.digest import weights_digest
from rlhf.reference.stored import LogprobTable
from rlhf.reference.surveyed import SurveyedExamples
from rlhf.train.context import RunContext

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_the_cache_equals_an_engine_for_every_row(folder: Path) -> None:
    run = make_run(folder)
    engine, cached = run.reference("engine"), run.reference("cache")
    for numbers in ([0, 5, 7], [11], list(range(12))):
        batch = pack(run.examples[0], numbers)
        expected = engine.token_logprobs(batch)
        assert torch.allclose(cached.token_logprobs(batch), expected, atol=1e-5)
        assert torch.allclose(
            cached.answer_logprobs(batch), engine.answer_logprobs(batch), atol=1e-4
        )
        values = batch.values["reference_logprobs"]
        assert int((~values.isnan()).sum()) == len(batch.predict)


def test_the_cache_is_computed_once_and_used_by_the_next_run(folder: Path) -> None:
    first, second = make_run(folder), make_run(folder)
    first.reference("cache")
    second.reference("cache")
    assert "12 examples computed in" in first.notes[0]
    assert "as configured; found in" in second.notes[0]


def test_a_filler_has_no_logprobs(folder: Path) -> None:
    run = make_run(folder)
    cached = run.reference("cache")
    assert cached.answer_logprobs(pack(run.examples[0], [])).shape == (0,)


def test_a_killed_run_keeps_its_parts_and_a_damaged_part_is_computed_again(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "PART", 5)
    whole = make_run(folder)
    expected = whole.reference("cache").token_logprobs(packed(whole))
    parts = sorted(cache.glob("reference/*/*/*.npy"))
    assert [path.name[:7] for path in parts] == ["000000-", "000001-", "000002-"]
    parts[0].unlink()
    parts[1].write_bytes(parts[1].read_bytes()[:-4] + b"\0\0\0\0")
    again = make_run(folder)
    found = again.reference("cache").token_logprobs(packed(again))
    assert "10 examples computed" in again.notes[0]
    assert torch.allclose(found, expected, atol=1e-5)
    assert sorted(cache.glob("reference/*/*/*.npy")) == parts


def test_progress_counts_the_parts_of_all_tables(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stored, "PART", 6)
    monkeypatch.setattr(compute, "SILENCE", -1)
    make_run(folder).reference("cache", survey=Crossing(None, None).survey_examples)
    assert [line for line in capsys.readouterr().out.splitlines() if "parts" in line] == [
        f"cache      {done} of 4 parts computed" for done in (1, 2, 3)
    ]


def table_in(place: Path, inputs: Path) -> LogprobTable:
    return LogprobTable(place, make_run(inputs).examples[0].files[0])


def test_a_part_that_cannot_be_written_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    table = table_in(tmp_path, folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match="10000 requested"):
            table.write(0, np.zeros(10_000, np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(table.folder.iterdir()) == []


def test_a_part_that_is_refused_names_its_place(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    table = table_in(tmp_path / "file", folder)
    with pytest.raises(RLHFError) as error:
        table.write(0, np.zeros(1, np.float32))
    assert str(error.value) == (
        f"cannot write to {table.folder} (Not a directory); choose another location"
    )


def test_weights_precision_and_tokens_change_the_key(folder: Path, tmp_path: Path) -> None:
    run = make_run(folder)
    own = weights_digest(run.config)
    half = attrs.evolve(run.config, model=attrs.evolve(run.config.model, dtype="bf16"))
    assert weights_digest(half) != own
    products = attrs.evolve(run.config, model=attrs.evolve(run.config.model, fp8="rowwise"))
    assert weights_digest(products) != own
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    model.save_pretrained(tmp_path / "same")
    (tmp_path / "same" / "config.json").write_bytes((folder / "model/config.json").read_bytes())
    same = attrs.evolve(run.config.model, path=str(tmp_path / "same"))
    assert weights_digest(attrs.evolve(run.config, model=same)) == own
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(tmp_path / "same")
    assert weights_digest(attrs.evolve(run.config, model=same)) != own
    file = run.examples[0].files[0]
    tokens = file._chunks[0]["tokens"][1].copy()
    digest = file.digest()
    tokens[3] += 1
    file._chunks[0]["tokens"] = (file._chunks[0]["tokens"][0], tokens)
    assert file.digest() != digest


def test_adapters_on_the_hub_have_different_keys(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(folder).config
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    digests = {weights_digest(config)}
    for name in ("first", "second"):
        adapter = loaded_from_hub(tmp_path, f"org/{name}")
        (adapter / "adapter_config.json").write_text("{}")
        (adapter / "adapter_model.safetensors").write_text(name)
        model = attrs.evolve(config.model, adapter=f"org/{name}")
        digests.add(weights_digest(attrs.evolve(config, model=model)))
    assert len(digests) == 3


def test_a_model_that_was_never_loaded_has_the_key_of_its_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attrs.evolve(make_run(folder).config.model, path="org/teacher")
    config = attrs.evolve(make_run(folder).config, model=model)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kept = loaded_from_hub(tmp_path, "org/teacher")
    (kept / "config.json").write_text("{}")
    with pytest.raises(RLHFError) as error:
        weights_digest(config)
    assert str(error.value) == "org/teacher has no weights here; download them, or check the name"

    def download(repository: str, *, allow_patterns: str, **_: object) -> None:
        assert repository == "org/teacher"
        if allow_patterns == "*.bin":
            (kept / "pytorch_model.bin").write_text("weights")

    monkeypatch.setattr("rlhf.reference.digest.snapshot_download", download)
    first = weights_digest(config)
    (kept / "pytorch_model.bin").write_text("others")
    assert weights_digest(config) != first


def test_the_cache_has_only_the_answers_of_the_rows(folder: Path) -> None:
    run = make_run(folder)
    reference = run.reference("cache")
    expected = (
        "the reference's mode is cache, which only has log-probabilities of the data's own "
        "answers and of run.reference(survey=...); call run.reference(live=True)"
    )
    with pytest.raises(RLHFError) as error:
        reference(packed(run), token_logprobs)
    assert str(error.value) == expected
    with pytest.raises(RLHFError) as error:
        reference.token_logprobs(attrs.evolve(packed(run), values={}))
    assert str(error.value) == expected


def test_cached_logprobs_are_split_by_answer(folder: Path) -> None:
    run = make_run(folder)
    run.reference("cache")
    example = run.examples[0][4]
    given = example.values["reference_logprobs"]
    assert [len(row) for row in given] == [len(answer.tokens) for answer in example.answers]
    assert all(row.dtype == np.float32 for row in given)


class Crossed:
    """Each prompt with the chosen answer of another row, and one more token after the prompt."""

    def __init__(self, examples: Examples, shift: int, *, more: int = 7) -> None:
        self.examples, self.others, self.more = examples, np.roll(np.arange(12), shift), more
        self.lengths = self.longest_path = np.array(
            [len(each.prompt) + len(each.answers[0].tokens) for each in self]
        )

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> Example:
        other = self.examples[int(self.others[number])].answers[0]
        return Example([*self.examples[number].prompt, self.more], [other], {"number": number})


class Crossing(Pairs):
    """A survey of such examples."""

    def survey_examples(self, examples: Examples, draw: np.random.Generator) -> Packable:
        return Crossed(examples, int(draw.integers(1, 12)))

    def survey(self, batch: PackedBatch) -> Any: ...


def surveyed(run: RunContext, *, step: int) -> PackedBatch:
    """What the first micro-batch of a survey sees."""
    order = run.order(Crossing(None, run.tokenizer))
    return order[order.step(step).survey[0]]


def test_the_cache_equals_an_engine_for_what_the_survey_sees(folder: Path) -> None:
    survey, run = Crossing(None, None).survey_examples, make_run(folder)
    engine, cached = run.reference("engine"), run.reference("cache", survey=survey)
    for step in range(3):
        batch = surveyed(run, step=step)
        expected = engine.token_logprobs(batch)
        assert torch.allclose(cached.token_logprobs(batch), expected, atol=1e-5)
        assert batch.values["number"].tolist() == list(batch.rows)
    assert cached.answer_logprobs(pack(run.surveyed[0], [])).shape == (0,)
    batch = pack(run.examples[0], [3])
    assert torch.allclose(cached.token_logprobs(batch), engine.token_logprobs(batch), atol=1e-5)


def test_the_survey_sees_the_examples_of_the_first_epoch_in_every_epoch_if_they_are_cached(
    folder: Path,
) -> None:
    def answers(run: RunContext) -> list[list[list[int]]]:
        """For two epochs the answer that each row gets."""
        order = run.order(Crossing(None, run.tokenizer))
        return [[[*each.answers[0].tokens] for each in order.surveyed(epoch)] for epoch in (0, 1)]

    survey, cached, engine = (
        Crossing(None, None).survey_examples,
        make_run(folder),
        make_run(folder),
    )
    cached.reference("cache", survey=survey)
    engine.reference("engine", survey=survey)
    first, second = answers(engine)
    assert first != second
    assert answers(cached) == [first, first]


def test_a_survey_is_computed_once_for_its_rows_and_seed(folder: Path) -> None:
    def note(run: RunContext) -> str:
        run.reference("cache", survey=Crossing(None, None).survey_examples)
        return run.notes[-1]

    assert "24 examples computed in" in note(make_run(folder))
    assert "as configured; found in" in note(make_run(folder))
    assert "12 examples computed in" in note(make_run(folder, train=TrainConfig(seed=1)))


def test_all_that_a_model_sees_of_a_survey_changes_its_key(folder: Path) -> None:
    examples = make_run(folder).examples[0]
    first = SurveyedExamples(Crossed(examples, 1))
    assert SurveyedExamples(Crossed(examples, 1)).digest() == first.digest()

    class Changed(Crossed):
        def __getitem__(self, number: int) -> Example:
            example = super().__getitem__(number)
            (answer,) = example.answers
            change = {
                "mask": {"answers": [Answer(answer.tokens, [False] * len(answer.tokens))]},
                "inputs": {"inputs": {"pixels": [[0.5]]}},
                "other inputs": {"inputs": {"pixels": [[0.7]]}},
                "split": {
                    "prompt": [*example.prompt, answer.tokens[0]],
                    "answers": [Answer(answer.tokens[1:])],
                },
            }
            return attrs.evolve(example, **change[self.kind] if number == 11 else {})

    digests = {first.digest(), SurveyedExamples(Crossed(examples, 2)).digest()}
    digests.add(SurveyedExamples(Crossed(examples, 1, more=8)).digest())
    for Changed.kind in ("mask", "inputs", "other inputs", "split"):  # type: ignore[attr-defined]
        digests.add(SurveyedExamples(Changed(examples, 1)).digest())
    assert len(digests) == 7
