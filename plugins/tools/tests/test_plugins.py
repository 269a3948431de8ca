"""`rlhf plugins`: the list and the check, on fake distributions."""

import json
from pathlib import Path

import pytest

import rlhf.preview  # noqa: F401  The fixture `install` hides torch.
from rlhf_devkit.distributions import (
    WITH_WRONG_DEFAULTS,
    WRONG_DEFAULTS,
    Install,
    install,
    toy,
)
from rlhf_tools.plugins import plugins_command

__all__ = ["install", "toy"]


def test_plugins_lists_each_with_its_problem(
    toy: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("rlhf-old", {"trainers": {"old": "gone:plugin"}}, requires=["rlhf-core<0.1"])
    assert plugins_command(check=None, as_json=False) == 0
    assert capsys.readouterr().out == (
        "name   kind     distribution  version  summary\n"
        "plain  backend  rlhf-toy      1.0      What rlhf-toy is\n"
        "old    trainer  rlhf-old      1.0      PROBLEM: it needs rlhf-core<0.1, "
        "but rlhf-core 0.1.0 is installed\n"
        "toy    trainer  rlhf-toy      1.0      What rlhf-toy is\n"
    )
    assert plugins_command(check=None, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)[0] == {
        "name": "plain",
        "kind": "backend",
        "distribution": "rlhf-toy",
        "version": "1.0",
        "summary": "What rlhf-toy is",
        "problem": None,
    }


TRAINER = """
    from rlhf.trainer import Trainer

    class Toy(Trainer):
        def example(self, row): ...
        def setup(self, run): ...
        def loss(self, batch): ...

    class Half(Trainer):
        def example(self, row): ...

    class Wrong:
        pass
"""
RECORDS = """
    from rlhf.hookspecs import hookimpl
    from rlhf.plugin import (
        BackendPlugin, ExtensionPlugin, FormatPlugin, ObserverPlugin, TrainerPlugin
    )
    from toy_plugin import PlainConfig, ToyConfig

    half = TrainerPlugin(config=ToyConfig, trainer="toy_trainer:Half")
    wrong = TrainerPlugin(config=ToyConfig, trainer="toy_trainer:Wrong")
    lost = TrainerPlugin(config=ToyConfig, trainer="toy_trainer:Toy", demo="lost.yaml")
    hooks = BackendPlugin(config=PlainConfig, hooks="toy_trainer:Wrong")

    ear = ObserverPlugin(hooks="toy_trainer:Wrong.ear")
    deaf = ObserverPlugin(hooks="toy_records:Deaf")
    plain = ObserverPlugin(hooks="toy_records:Tuned")
    tuned = ObserverPlugin(config=ToyConfig, hooks="toy_records:Sound")

    gone = ExtensionPlugin(hooks="toy_records:Gone")
    mute = ExtensionPlugin(hooks="toy_records:Mute")
    rows = FormatPlugin(read="toy_trainer:Wrong.rows")

    class Deaf:
        @hookimpl
        def on_stop(self, run):
            pass

    class Sound:
        @hookimpl
        def on_step(self, step):
            pass

    class Tuned(Sound):
        def __init__(self, config):
            pass

    class Mute:
        @hookimpl(wrapper=True)
        def setup_mesh(self):
            return None
"""


def test_plugins_check_loads_each_plugin_and_reports_its_errors(
    toy: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    trainers = {name: f"toy_records:{name}" for name in ("half", "wrong", "lost")}
    groups = {
        "trainers": trainers,
        "backends": {"empty": "toy_records:hooks"},
        "observers": {name: f"toy_records:{name}" for name in ("ear", "deaf", "plain", "tuned")},
        "extensions": {name: f"toy_records:{name}" for name in ("gone", "mute", "Mute")},
        "formats": {"rows": "toy_records:rows"},
    }
    install("rlhf-more", groups, {"toy_trainer": TRAINER, "toy_records": RECORDS})
    assert plugins_command(check="check", as_json=False) == 2
    more = "of rlhf-more 1.0"
    assert capsys.readouterr().out.splitlines() == [
        f"broken      backend 'empty' {more}: backend toy_trainer.Wrong does not implement the "
        "hook 'setup_mesh'",
        "broken      backend 'plain' of rlhf-toy 1.0: cannot be imported: ModuleNotFoundError: "
        "No module named 'toy_hooks' (`python -c 'import toy_hooks'` shows where)",
        f"broken      extension 'Mute' {more}: toy_records:Mute is a type, not a "
        "rlhf.plugin.ExtensionPlugin",
        f"broken      extension 'gone' {more}: no 'Gone' in toy_records; correct hooks=",
        f"broken      extension 'mute' {more}: extension toy_records.Mute: 'setup_mesh' is a "
        "wrapper without yield; write `result = yield` and return the result",
        f"broken      format 'rows' {more}: no 'Wrong.rows' in toy_trainer; correct read=",
        f"broken      observer 'deaf' {more}: observer toy_records.Deaf: 'on_stop' is not a hook "
        "of observers; did you mean 'on_step'?",
        f"broken      observer 'ear' {more}: no 'Wrong.ear' in toy_trainer; correct hooks=",
        f"broken      observer 'plain' {more}: its class takes a config, but its record has none; "
        "add config= to the record",
        f"broken      observer 'tuned' {more}: its record has a config, but its class takes none; "
        "add `config` to __init__",
        f"broken      trainer 'half' {more}: toy_trainer:Half does not define loss, setup",
        f"broken      trainer 'lost' {more}: its demo {toy}/lost.yaml does not exist",
        "ok          trainer 'toy' of rlhf-toy 1.0",
        f"broken      trainer 'wrong' {more}: toy_trainer:Wrong is not a subclass of "
        "rlhf.trainer.Trainer",
    ]


def test_a_plugin_that_lacks_a_distribution_is_not_usable_but_not_broken(
    toy: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    record = """
        from rlhf.plugin import TrainerPlugin
        from toy_plugin import ToyConfig
        plugin = TrainerPlugin(config=ToyConfig, trainer="no:T", requires=("ear-lib>=1",))
    """
    install("rlhf-ears", {"trainers": {"ear": "toy_ear:plugin"}}, {"toy_ear": record})
    plugins_command(check="check", as_json=False)
    assert (
        "not usable  trainer 'ear' of rlhf-ears 1.0: needs ear-lib>=1; "
        "run `pip install 'ear-lib>=1'`"
    ) in capsys.readouterr().out.splitlines()


def test_a_default_that_is_not_a_setting_is_the_fault_of_the_plugin(
    toy: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = {"toy_trainer": TRAINER, "toy_defaults": WITH_WRONG_DEFAULTS}
    install("rlhf-more", {"trainers": {"more": "toy_defaults:plugin"}}, modules)
    assert plugins_command(check="check", as_json=False) == 2
    lines = capsys.readouterr().out.splitlines()
    assert f"broken      trainer 'more' of rlhf-more 1.0: {WRONG_DEFAULTS}" in lines


HELLO = """
    from rlhf.plugin import CommandPlugin

    def greet():
        return 0

    plugin = CommandPlugin(help="greet", run="hello_plugin:greet")
    words = CommandPlugin(help="print words", run="hello_plugin:lost")
"""


def test_a_broken_command_is_named_beside_a_sound_one(
    toy: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {"hello": "hello_plugin:plugin", "lost": "hello_plugin:words", "gone": "gone:plugin"}
    groups = {"commands": commands | {"run": "hello_plugin:plugin"}}
    install("rlhf-hello", groups, {"hello_plugin": HELLO})
    assert plugins_command(check="check", as_json=False) == 2
    assert capsys.readouterr().out.splitlines()[1:5] == [
        "broken      command 'gone' of rlhf-hello 1.0: cannot be imported: ModuleNotFoundError: "
        "No module named 'gone' (`python -c 'import gone'` shows where)",
        "ok          command 'hello' of rlhf-hello 1.0",
        "broken      command 'lost' of rlhf-hello 1.0: no 'lost' in hello_plugin; correct run=",
        "broken      command 'run' of rlhf-hello 1.0: its name 'run' is reserved for core",
    ]
