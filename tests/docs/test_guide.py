"""The trainer of docs/guide.md passes the kit, and its model is used as the page says."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from doc_blocks import in_place
from guide_package import install_guide
from rlhf.readouts import exported_extra
from rlhf_devkit import Ranks, command
from sft_runs import Inputs


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guide")
    install_guide(folder)
    return folder


@pytest.mark.matrix
def test_the_trainer_of_the_guide_passes_its_own_tests(site: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    environment.pop("RLHF_STRICT_REHEARSAL", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(site / "tests")],
        cwd=site,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def train(site: str, cache: str, words: list[str]) -> None:
    """`rlhf WORDS` in a rank, with the distribution installed."""
    os.environ["RLHF_CACHE"] = cache
    if site not in sys.path:
        sys.path.insert(0, site)
    command(*words)


def test_the_model_of_the_guide_rates_as_the_run_does(
    site: Path, inputs: Inputs, one: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "run", "ordinal", "--model", str(inputs.model), "--model.dtype", "fp32", "--batch", "4",
        "--data", str(site / "ratings.jsonl"), "--train.steps", "4", "--optim.lr", "1e-2",
        "--output", str(tmp_path / "run"),
    ]  # fmt: skip
    one.run(train, str(site), str(inputs.cache), words)
    folder = tmp_path / "run" / "model"
    thresholds = exported_extra(folder)["thresholds"]
    assert not torch.allclose(thresholds, torch.linspace(-1.0, 1.0, 4))
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    assert plain.config.ordinal_levels == 5
    again = ["export", str(tmp_path / "run"), str(tmp_path / "exported")]
    one.run(train, str(site), str(inputs.cache), again)
    assert torch.equal(exported_extra(tmp_path / "exported")["thresholds"], thresholds)
    monkeypatch.syspath_prepend(str(site))
    scorer = importlib.import_module("my_ordinal.scorer").Scorer(str(folder))
    tokens = [5, 6, 7, 8]
    with torch.no_grad():
        score = plain(input_ids=torch.tensor([tokens])).logits[0]
    assert scorer.rating(tokens) == 1 + int((score > thresholds).sum())


def test_a_rating_out_of_range_is_reported_with_its_line(
    site: Path, inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b", "rating": 6}\n')
    words = ["inspect", "ordinal", "--model", str(inputs.model), "--data", str(rows)]
    ((code, error),) = one.run(in_place, words, str(site), str(inputs.cache))
    assert code == 2
    assert f"{rows} line 1: `rating` must be an integer from 1 to 5, got 6" in error
