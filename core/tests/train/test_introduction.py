"""What a run says of itself at its start."""

from pathlib import Path

from fits import on_accelerator, small_run

from rlhf.request.reader import read_config
from rlhf.train.dataset import prepare_data
from rlhf.train.introduction import summary


def test_the_summary_of_a_run_on_an_accelerator_has_its_estimate_by_part(tmp_path: Path) -> None:
    fit = on_accelerator(small_run(tmp_path), 2**30)
    request = read_config("sft", overrides=small_run(tmp_path))
    memory = summary(fit, prepare_data(request))["memory"]
    assert memory["peak"] == fit.peak == sum(memory["parts"].values())
    assert memory["device"] == 2**30
