"""Heads of any number of labels, and a trainer's own parameters: loading, export, adapters."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from engines import WholeWeights
from families import chatml_tokenizer
from huggingface_hub import constants
from small_models import SIZES, config_of, loaded_from_hub, write_model
from transformers import AutoModelForSequenceClassification, LlamaConfig

from rlhf.commands.merge import merge_command
from rlhf.config.sections import LoraConfig
from rlhf.data.example import Answer, Example
from rlhf.data.packing import pack
from rlhf.engine import Mesh, Plan
from rlhf.errors import RLHFError
from rlhf.model.extra import first_values, notes_on_extra, save_extra
from rlhf.model.head import Head
from rlhf.model.load import load_model
from rlhf.model.packed import PackedModel
from rlhf.model.role import ModelSpec
from rlhf.model.save import save_tokenizer_and_config, verify_export
from rlhf.model.shape import empty_model, shape_of
from rlhf.readouts import exported_extra, exported_model, scores
from rlhf.scorer import Scorer
from rlhf.trainer import Row

EXTRA = {"thresholds": torch.tensor([-1.0, 0.5, 2.0, 3.0]), "mixing": torch.eye(2)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    return write_model(folder, LlamaConfig(**SIZES, tie_word_embeddings=True, pad_token_id=4))


def load(path: str, labels: int | None = 5, **sections: Any) -> PackedModel:
    config = config_of(path, **sections)
    extra = first_values(config, EXTRA)
    spec = ModelSpec(config=config, task="sequence", labels=labels, extra=extra)
    plan, hooks = Plan(precision="fp32"), cast(Any, WholeWeights())
    return load_model(spec, plan=plan, mesh=Mesh(), hooks=hooks).eval()


def test_an_average_is_in_float32_in_16_bits_and_is_exported_like_the_others(
    base: str, tmp_path: Path
) -> None:
    spec = ModelSpec(config=config_of(base), extra=EXTRA, averages=["mixing"])
    plan, hooks = Plan(precision="bf16"), cast(Any, WholeWeights())
    module = load_model(spec, plan=plan, mesh=Mesh(), hooks=hooks)
    found = {name: (value.dtype, value.requires_grad) for name, value in module.extra.items()}
    assert found == {
        "thresholds": (torch.bfloat16, True), "mixing": (torch.float32, False)
    }  # fmt: skip
    written = exported_extra(export(module, tmp_path / "model"))
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    assert torch.equal(written["mixing"], torch.eye(2, dtype=torch.bfloat16))


def export(module: PackedModel, folder: Path) -> Path:
    """Change what is trained, and write it as a run does."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    folder.mkdir()
    module.save_weights(module.state_dict(), folder)
    save_tokenizer_and_config(module.model, chatml_tokenizer(), folder)
    verify_export(folder, module.model, module.extra_parameters)
    return folder


def read_thresholds(hidden: torch.Tensor, head: Head, batch: Any) -> dict[str, torch.Tensor]:
    found = scores(hidden, head, batch)["scores"]
    return {"scores": found, "odds": found[:, :4] - head.extra["thresholds"]}


TREES = pack([Example([3, 20, 6], [Answer([8, 9]), Answer([11, 12, 13])])], [0])


def test_a_head_of_five_labels_with_parameters_is_exported_and_trained_further(
    base: str, tmp_path: Path
) -> None:
    module = load(base)
    own = {name: value.tolist() for name, value in module.extra_parameters.items()}
    assert own == {name: value.tolist() for name, value in EXTRA.items()}
    module.extra_parameters["thresholds"].data += 1
    assert EXTRA["thresholds"].tolist() == [-1.0, 0.5, 2.0, 3.0], "the first values stay"
    folder = export(module, tmp_path / "model")
    assert {path.name for path in folder.rglob("*.safetensors")} >= {
        "model.safetensors",
        "parameters.safetensors",
    }
    saved = exported_extra(folder)
    for name, value in module.extra_parameters.items():
        assert torch.equal(saved[name], value)
    read = module(TREES, read_thresholds)
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert plain.config.id2label == {n: f"LABEL_{n}" for n in range(5)}
    with torch.no_grad():
        rows = [
            plain(input_ids=torch.tensor([[3, 20, 6, *rest]])).logits[0]
            for rest in ([8, 9], [11, 12, 13])
        ]
    torch.testing.assert_close(read["scores"], torch.stack(rows), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(read["odds"], torch.stack(rows)[:, :4] - saved["thresholds"])
    again = load(str(folder))(TREES, read_thresholds)
    assert torch.equal(again["odds"], read["odds"])


def test_parameters_are_trained_beside_an_adapter_and_merged_with_it(
    base: str, tmp_path: Path
) -> None:
    module = load(base, lora=LoraConfig(rank=2))
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    assert {"extra.thresholds", "extra.mixing"} <= trained
    assert not any("embed_tokens" in name for name in trained)
    folder = export(module, tmp_path / "adapter")
    expected = module.extra_parameters["thresholds"]
    again = load(base, model={"adapter": str(folder)})
    assert torch.equal(again.extra_parameters["thresholds"], expected)
    merge_command(str(folder), str(tmp_path / "merged"))
    assert torch.equal(exported_extra(tmp_path / "merged")["thresholds"], expected)
    merged = exported_model(tmp_path / "merged", "sequence").eval()
    with torch.no_grad():
        found = merged(input_ids=torch.tensor([[3, 20, 6, 8, 9]])).logits[0]
    torch.testing.assert_close(module(TREES, scores)["scores"][0], found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_parameters_count_in_the_size_of_the_model(base: str, lora: Any) -> None:
    module = load(base, lora=lora)
    config = config_of(base, lora=lora)
    shape = shape_of(
        empty_model(ModelSpec(config=config, task="sequence", labels=5, extra=EXTRA), Mesh())
    )
    assert shape.parameters == sum(value.numel() for value in module.parameters())
    assert shape.trainable == sum(v.numel() for v in module.parameters() if v.requires_grad)


def test_a_damaged_file_of_parameters_is_noticed(base: str, tmp_path: Path) -> None:
    module = load(base)
    folder = export(module, tmp_path / "model")
    (folder / "extra" / "parameters.safetensors").unlink()
    with pytest.raises(RLHFError, match=r"mixing is missing \(expected shape \[2, 2\]\)"):
        verify_export(folder, module.model, module.extra_parameters)


def test_parameters_of_another_shape_are_refused(base: str, tmp_path: Path) -> None:
    folder = export(load(base), tmp_path / "model")
    with pytest.raises(RLHFError) as error:
        first_values(config_of(str(folder)), {"thresholds": torch.zeros(2)})
    assert str(error.value) == (
        f"{folder} has the parameter 'thresholds' of shape [4], but this trainer's has [2]; choose "
        "the model it was trained from"
    )
    with pytest.raises(RLHFError) as error:
        load(str(folder), labels=4)
    assert str(error.value) == (
        f"model.path {folder} is LlamaForSequenceClassification with 5 labels, but this trainer's "
        "head has 4 (LABEL_0, LABEL_1, LABEL_2, LABEL_3); choose the language model it was trained "
        "from"
    )


def test_parameters_that_are_not_those_of_the_trainer_are_named(base: str, tmp_path: Path) -> None:
    folder = export(load(base), tmp_path / "model")
    own = config_of(str(folder))
    assert [*notes_on_extra(own, EXTRA), *notes_on_extra(config_of(base), EXTRA)] == []
    assert [*notes_on_extra(own, {})] == [
        f"extra      {folder} has parameters that this trainer does not use: mixing and thresholds"
    ]
    assert [*notes_on_extra(own, {**EXTRA, "scale": torch.ones(1)})] == [
        f"extra      {folder} has no scale, so this trainer's own values are used"
    ]


def test_an_adapter_on_the_hub_has_a_revision_of_its_own(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    save_extra({"thresholds": torch.ones(4)}, loaded_from_hub(tmp_path, "org/adapter"))
    config = config_of(base, model={"adapter": "org/adapter", "revision": "of-the-base"})
    assert first_values(config, EXTRA)["thresholds"].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (
            {"values": torch.zeros(1)},
            "run.load(): an extra parameter cannot have the name 'values'; rename it",
        ),
        (
            {"scale": torch.tensor(1.0)},
            "run.load(): the extra parameter 'scale' is a scalar; give it the shape [1]",
        ),
    ],
)
def test_an_invalid_parameter_is_refused(extra: Any, text: str, base: str) -> None:
    with pytest.raises(RLHFError) as error:
        first_values(config_of(base), extra)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("task", "labels", "text"),
    [
        (
            "causal",
            3,
            "run.load(): task 'causal' cannot have 3 labels; use sequence or token with at least "
            "one",
        ),
        (
            "sequence",
            0,
            "run.load(): task 'sequence' cannot have 0 labels; use sequence or token with at least "
            "one",
        ),
        (
            "classifier",
            None,
            "run.load(): task 'classifier' is unknown; available: causal, sequence, token",
        ),
    ],
)
def test_invalid_labels_are_refused(task: Any, labels: Any, text: str, base: str) -> None:
    with pytest.raises(RLHFError) as error:
        empty_model(ModelSpec(config=config_of(base), task=task, labels=labels), Mesh())
    assert str(error.value) == text


class Ratings(Scorer):
    """Ratings from scores and thresholds."""

    def encode(self, prompt: Any, answers: Any) -> Row:
        return Row(prompt, answers, {"ends": [[len(each.tokens) - 1] for each in answers]})

    def scores(self, logits: torch.Tensor) -> list[float]:
        return (logits[:, :1] > self.extra["thresholds"].float()).sum(1).tolist()


def test_a_scorer_has_the_trainer_s_own_parameters(base: str, tmp_path: Path) -> None:
    module = load(base, labels=1)
    scorer = Ratings(export(module, tmp_path / "model"), task="sequence")
    assert scorer.extra.keys() == EXTRA.keys()
    (logits,) = scorer.read([1, 2, 3], [Answer([4, 5])])
    thresholds = module.extra["thresholds"].detach()
    assert scorer.scores(logits) == [float((logits[0, 0] > thresholds).sum())]
    scorer.pack()
    assert torch.allclose(scorer.read([1, 2, 3], [Answer([4, 5])])[0], logits, atol=1e-5)
