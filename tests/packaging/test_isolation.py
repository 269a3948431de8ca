"""A broken, duplicate, outdated or slow plugin hurts only itself, beside the wheels of ours; and
a list of plugins imports none."""

from pathlib import Path

import pytest

from wheel_sites import ROOT, build, make_site, rlhf

RECORD = """
from attrs import frozen
from rlhf.plugin import TrainerPlugin

@frozen(kw_only=True)
class Section:
    '''No settings.'''

plugin = TrainerPlugin(config=Section, trainer="{name}:Missing")
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheels of the core, the backend, its optimizers, one trainer with the rows of its demo,
    and the commands around runs."""
    names = ("deepspeed", "demo", "optim", "rows", "sft", "tools")
    projects = [ROOT / "core", *(ROOT / "plugins" / name for name in names)]
    return [*build(tmp_path_factory.mktemp("wheels"), projects).values()]


@pytest.fixture
def site(wheels: list[Path], tmp_path: Path) -> Path:
    """These wheels in a folder of their own."""
    return make_site(tmp_path, wheels)


def add(site: Path, name: str, trainer: str, source: str, *, core: str = ">=0.1,<0.2") -> None:
    """Install a distribution with a trainer."""
    module = name.replace("-", "_")
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        "Version: 1.0",
        f"Requires-Dist: rlhf-core{core}",
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "entry_points.txt").write_text(f"[rlhf.trainers]\n{trainer} = {module}:plugin\n")
    (site / f"{module}.py").write_text(source)


def test_a_broken_plugin_does_not_affect_the_others(site: Path, tmp_path: Path) -> None:
    add(site, "rlhf-broken", "broken", "raise ValueError('at import')")
    add(site, "rlhf-slow", "slow", "import time\ntime.sleep(600)")
    add(site, "rlhf-outdated", "outdated", RECORD.format(name="x"), core=">=7")
    add(site, "rlhf-first", "twin", RECORD.format(name="rlhf_first"))
    add(site, "rlhf-second", "twin", RECORD.format(name="rlhf_second"))
    listed = rlhf(site, "plugins")
    assert listed.returncode == 0, listed.stderr
    lines = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert "PROBLEM: it needs rlhf-core>=7, but rlhf-core 0.1.0 is installed" in lines["outdated"]
    assert "PROBLEM: rlhf-first 1.0 and rlhf-second 1.0 both provide it" in lines["twin"]
    for name in ("broken", "slow", "sft", "deepspeed"):
        assert "PROBLEM" not in lines[name]
    # The sound trainer's command imports none of them.
    assert rlhf(site, "config", "sft").returncode == 0
    errors = {
        "broken": "trainer 'broken' of rlhf-broken 1.0 cannot be imported: ValueError: at import "
        "(`python -c 'import rlhf_broken'` shows where)",
        "outdated": "trainer 'outdated' cannot be used: it needs rlhf-core>=7, but rlhf-core 0.1.0 "
        "is installed",
        "twin": "trainer 'twin' cannot be used: rlhf-first 1.0 and rlhf-second 1.0 both provide "
        "it; uninstall one",
    }
    for name, message in errors.items():
        done = rlhf(site, "run", name, folder=tmp_path)
        assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_plugins_check_reports_a_broken_plugin_and_continues(site: Path) -> None:
    add(site, "rlhf-broken", "broken", "raise ValueError('at import')")
    add(site, "rlhf-first", "twin", RECORD.format(name="rlhf_first"))
    done = rlhf(site, "plugins", "check")
    assert done.returncode == 2
    state = {line.split("'")[1]: line.split()[0] for line in done.stdout.splitlines()}
    demos = dict.fromkeys(("arithmetic", "base", "equations", "ranked", "sums"), "ok")
    commands = ("cache", "doctor", "inspect", "launch", "plan", "plugins", "push", "report", "runs")
    formats = dict.fromkeys(("demonstration", "preference", "prompt", "unpaired"), "ok")
    tools = dict.fromkeys(("card", *commands), "ok")
    others = {"deepspeed": "ok", "broken": "broken", "sft": "ok", "twin": "broken"}
    assert state == demos | tools | formats | others


def test_fifty_plugins_are_listed_without_an_import(site: Path) -> None:
    for number in range(50):
        add(site, f"rlhf-many-{number}", f"many_{number}", "raise SystemExit('imported')")
    done = rlhf(site, "plugins")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("rlhf-many-") == 50
