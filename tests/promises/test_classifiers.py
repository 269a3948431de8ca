"""Models of families without a classifier are refused before rows are read."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, GraniteConfig

import rlhf_demo
from rlhf.errors import RLHFError
from rlhf.request.reader import read_config
from rlhf.train.dataset import prepare_data

ONE = "choose a family that has one, such as llama, qwen3 or mistral"
PPO = ", or set ppo.critic.model to a reward model with the same tokenizer"


@pytest.mark.parametrize(
    ("trainer", "kind", "otherwise"),
    [
        ("rm", "Sequence", ""),
        ("prm", "Token", ", or set prm.formulation to token"),
        ("ppo", "Token", PPO),
    ],
)
def test_a_family_without_the_classifier_is_refused_before_rows_are_read(
    trainer: str, kind: str, otherwise: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    GraniteConfig(**sizes, num_attention_heads=2).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(rlhf_demo.base_model_folder()).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "rows.jsonl").write_text('{"text": "no row of these trainers"}\n')
    words = ["--model", str(tmp_path), "--data", str(tmp_path / "rows.jsonl")]
    words += ["--ppo.rewards", "exact"] if trainer == "ppo" else []
    with pytest.raises(RLHFError) as caught:
        prepare_data(read_config(trainer, overrides=words))
    assert str(caught.value) == (
        f"transformers has no AutoModelFor{kind}Classification for granite (model.path "
        f"{tmp_path}); {ONE}{otherwise}"
    )
