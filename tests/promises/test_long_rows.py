"""The estimates for long rows in docs/backends.md are those of `rlhf plan`."""

import json
import re
from pathlib import Path

import pytest
from transformers import Qwen2Config

from rlhf.commands.main import main
from rlhf.engine import gib
from rlhf_devkit import make_model, write_rows

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"
ROW = re.compile(r"\| ([\d,]+) \| (\d) \| ([\d.]+)(.*) \| ([\d.]+)(.*) \|")
"""A line of the table: tokens, ranks, GiB at ZeRO 1 and at ZeRO 3, each with a remark."""


@pytest.mark.matrix
def test_the_table_of_long_rows_is_what_the_plan_estimates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    Qwen2Config(
        vocab_size=151_936, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=131_072,
        tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(model)  # fmt: skip
    text = " ".join(map(str, range(60_000)))
    sides = (("user", "Count."), ("assistant", text))
    row = {"messages": [{"role": role, "content": content} for role, content in sides]}
    words = [
        "plan", "sft", "--json", "--gpus", "4", "--gpu-memory", "80", "--model", str(model),
        "--model.init", "random", "--model.dtype", "bf16", "--model.recompute", "full",
        "--data", str(write_rows(tmp_path / "rows.jsonl", [row] * 4)), "--data.too_long", "cut",
        "--batch.size", "4",
    ]  # fmt: skip
    found = ROW.findall(PAGE.read_text())
    assert len(found) == 3
    for tokens, size, *columns in found:
        number = tokens.replace(",", "")
        row_of = ("--data.max_tokens", number, "--batch.tokens", number)
        capsys.readouterr()
        # 2 where no layout that the run may choose by itself fits.
        assert main([*words, *row_of, "--deepspeed.sequence_parallel", size]) in (0, 2)
        layouts = json.loads(capsys.readouterr().out)["layouts"]
        stages = {each["layout"]: each for each in layouts}
        expected = []
        for stage in ("ZeRO 1", "ZeRO 3"):
            fits = stages[stage]["fits"]
            expected += [gib(stages[stage]["peak"]), "" if fits else " (does not fit)"]
        assert columns == expected
