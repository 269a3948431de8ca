"""What the terminal shows of a logged step."""

import re

import pytest

from rlhf.train.progress import Progress


@pytest.mark.parametrize(
    ("more", "shown"), [({}, "loss 0.5  grad_norm 1"), ({"reward": 2.0}, "loss 0.5  reward 2")]
)
def test_a_step_shows_the_reward_where_there_is_one(
    more: dict[str, float], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(0, 4)
    progress.logged(1, {"loss": 0.5, "grad_norm": 1.0, "tokens_per_s": 10.0, **more})
    progress.close()
    line = capsys.readouterr().out
    assert line.startswith(f"step 1/4  {shown}"), line
    assert re.search(r"\d:\d\d left$", line.rstrip())
