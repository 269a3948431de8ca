"""The trainers of docs/plugins.md train, and what the page says of packing holds for them."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlhf_demo
from rlhf_devkit import TrainerConformance, column
from rlhf_devkit.conformance import bench_of

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
RECORD = """
from attrs import frozen
from rlhf.plugin import TrainerPlugin

@frozen(kw_only=True)
class Section:
    '''The settings of the trainers on the page.'''
    power: float = 1.0
    '''Exponent.'''
    teacher: str = ""
    '''Folder of a second model.'''

plugin = TrainerPlugin(config=Section, trainer="page_trainers:{name}")
"""
NAMES = (
    "MyTrainer", "OwnRows", "Imitation", "ActorCritic", "Denoiser", "TokenDPO", "AboveAverage",
    "Retrieval", "Draws", "Clipped", "Judged", "Verified",
)  # fmt: skip
CLASS = r"^class (\w+)\((?:Trainer|Draws)\)"
QUESTIONS = [
    {"question": row["messages"][0]["content"], "answer": row["messages"][1]["content"], "share": 1}
    for row in rlhf_demo.rows("arithmetic", "train", "demonstration")[:29]
]
IMAGES = [{"image": [0.1, 0.7, 0.2, number / 29]} for number in range(29)]


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with every trainer on the page."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    trainers = [block for block in blocks if re.search(CLASS, block, re.MULTILINE)]
    site = tmp_path / "site"
    info = site / "page-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: page\nVersion: 1.0\n")
    entries = "".join(f"{name} = page_{name}:plugin\n" for name in NAMES)
    (info / "entry_points.txt").write_text(f"[rlhf.trainers]\n{entries}")
    for name in NAMES:
        (site / f"page_{name}.py").write_text(RECORD.replace("{name}", name))
    (site / "page_trainers.py").write_text("\n".join(trainers))
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield
    for name in ("page_trainers", *(f"page_{name}" for name in NAMES)):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_of_the_page_trains_and_packs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Kit(TrainerConformance):
        trainer = name
        rows = {"OwnRows": QUESTIONS, "Denoiser": IMAGES}.get(name)
        words = (f"--{name}.teacher", "{other_model}")

    bench = bench_of(Kit, tmp_path / "bench")
    assert len(column(bench.plain(), "loss")) == 8
    random = "judge      a new head with random values: "
    assert (random in capsys.readouterr().out) == (name == "Judged")
    Kit().test_packed_equals_separate_in_loss_and_gradients(bench)


def test_every_trainer_of_the_page_is_tested() -> None:
    assert tuple(re.findall(CLASS, PAGE.read_text(), re.MULTILINE)) == NAMES
