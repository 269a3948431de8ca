"""Plugins by entry point: what metadata and records say, and every error word for word."""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import rlhf.registry.installed
from rlhf.errors import RLHFError
from rlhf.registry.imports import demo_file, load_object, load_record, load_user_object
from rlhf.registry.installed import find, find_backend, installed
from rlhf_devkit.distributions import Install

KNOWN = Path(rlhf.registry.installed.__file__).with_name("known_plugins.txt")
PLUGINS = Path(__file__).parents[3] / "plugins"


def error_of(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(RLHFError) as caught:
        call(*arguments)
    return str(caught.value)


def known_plugins() -> str:
    """What the list of our own plugins should hold: kind, name and distribution of each."""
    lines = []
    for path in PLUGINS.glob("*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        for group, entries in project.get("entry-points", {}).items():
            kind = rlhf.registry.installed.GROUPS[group]
            lines += [f"{kind} {name} {project['name']}\n" for name in entries]
    return "".join(sorted(lines))


@pytest.mark.skipif(not PLUGINS.is_dir(), reason="the plugins are not here")
def test_the_list_of_our_own_plugins_is_what_the_folder_plugins_holds() -> None:
    assert KNOWN.read_text() == known_plugins(), f"run python {__file__}"


def test_a_plugin_that_cannot_be_imported_is_listed_from_metadata(install: Install) -> None:
    groups = {"trainers": {"bad": "bad_plugin:plugin"}}
    install("rlhf-bad", groups, {"bad_plugin": "raise ValueError('at import')"})
    (row,) = installed()
    assert (row.kind, row.name, row.distribution, row.version) == (
        "trainer",
        "bad",
        "rlhf-bad",
        "1.0",
    )
    assert (row.summary, row.problem) == ("What rlhf-bad is", None)
    assert "bad_plugin" not in sys.modules


def test_a_plugin_that_does_not_import_names_its_distribution_and_the_exception(
    install: Install,
) -> None:
    groups = {"trainers": {"bad": "bad_plugin:plugin"}}
    install("rlhf-bad", groups, {"bad_plugin": "raise ValueError('at import')"})
    assert error_of(load_record, find("trainer", "bad")) == (
        "trainer 'bad' of rlhf-bad 1.0 cannot be imported: ValueError: at import "
        "(`python -c 'import bad_plugin'` shows where)"
    )


def test_an_unknown_name_gets_a_near_match_and_the_installed_names(toy: Path) -> None:
    assert error_of(find, "trainer", "toi") == (
        "trainer 'toi' is not installed (did you mean 'toy'?); available: toy (rlhf-toy 1.0)"
    )
    assert error_of(find, "observer", "toy") == "observer 'toy' is not installed; available: none"


def test_an_install_is_proposed_for_our_own_plugins_only(toy: Path) -> None:
    assert error_of(find, "trainer", "sft") == (
        "trainer 'sft' is not installed (run `pip install rlhf-plugin-sft`); "
        "available: toy (rlhf-toy 1.0)"
    )
    assert error_of(find, "observer", "tensorboard") == (
        "observer 'tensorboard' is not installed (run `pip install rlhf-observer-tensorboard`); "
        "available: none"
    )
    assert error_of(find, "trainer", "stf") == (
        "trainer 'stf' is not installed (did you mean 'sft'? "
        "run `pip install rlhf-plugin-sft`); available: toy (rlhf-toy 1.0)"
    )
    assert error_of(find, "trainer", "requests") == (
        "trainer 'requests' is not installed; available: toy (rlhf-toy 1.0)"
    )


def test_two_distributions_with_one_name_cannot_be_used(toy: Path, install: Install) -> None:
    install("other-toy", {"trainers": {"toy": "other:plugin"}}, version="2.0")
    message = "other-toy 2.0 and rlhf-toy 1.0 both provide it; uninstall one"
    assert error_of(find, "trainer", "toy") == f"trainer 'toy' cannot be used: {message}"
    assert [row.problem for row in installed() if row.kind == "trainer"] == [message, message]


def test_a_distribution_that_is_found_twice_is_one(install: Install, tmp_path: Path) -> None:
    groups = {"trainers": {"twice": "twice_plugin:plugin"}}
    install("rlhf-twice", groups)
    install("rlhf_twice", groups, folder=tmp_path / "editable")
    assert find("trainer", "twice").distribution == "rlhf_twice"


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("rlhf-core>=0.1,<0.2", None),
        ("rlhf-core>=0.1; python_version > '3'", None),
        ("rlhf-core-extras>=7", None),
        ("rlhf-core>=7; extra == 'new'", None),
        ("rlhf-core<0.1", "it needs rlhf-core<0.1, but rlhf-core 0.1.0 is installed"),
        ("rlhf_core>=0.2,<0.3", "it needs rlhf_core>=0.2,<0.3, but rlhf-core 0.1.0 is installed"),
    ],
)
def test_an_unsatisfied_version_of_core_is_reported_from_metadata(
    install: Install, requirement: str, problem: str | None
) -> None:
    install("rlhf-old", {"trainers": {"old": "old_plugin:plugin"}}, requires=[requirement])
    assert installed()[0].problem == problem
    if problem is not None:
        assert error_of(find, "trainer", "old") == f"trainer 'old' cannot be used: {problem}"


def test_names_of_core_and_names_that_are_not_identifiers_are_refused(install: Install) -> None:
    names = {"optim": "a:b", "resume": "a:b", "my-toy": "a:b"}
    install("rlhf-names", {"trainers": names, "observers": names})
    problems = {row.name: row.problem for row in installed() if row.kind == "trainer"}
    assert problems == {
        "optim": "its name 'optim' is reserved for core",
        "resume": "its name 'resume' is reserved for core",
        "my-toy": "its name 'my-toy' is not a Python identifier, so it cannot be a section",
    }
    assert {row.problem for row in installed() if row.kind == "observer"} == {None}


def test_the_only_backend_is_the_default_and_several_need_a_choice(
    toy: Path, install: Install
) -> None:
    assert find_backend(None).name == "plain"
    install("rlhf-second", {"backends": {"second": "second_plugin:plugin"}})
    assert error_of(find_backend, None) == (
        "several backends are installed (plain, second); choose one with --backend NAME"
    )
    assert find_backend("second").distribution == "rlhf-second"


def test_no_backend_proposes_ours(install: Install) -> None:
    assert error_of(find_backend, None) == (
        "no backend is installed; run `pip install rlhf-plugin-deepspeed`"
    )


def test_a_record_of_another_kind_is_refused(toy: Path, install: Install) -> None:
    groups = {"trainers": {"wrong": "wrong_plugin:plugin", "plain": "wrong_plugin:other"}}
    source = """
        from rlhf.plugin import TrainerPlugin
        plugin = {}
        other = TrainerPlugin(config=int, trainer="a:b")
    """
    install("rlhf-wrong", groups, {"wrong_plugin": source})
    assert error_of(load_record, find("trainer", "wrong")) == (
        "trainer 'wrong' of rlhf-wrong 1.0: wrong_plugin:plugin is a dict, "
        "not a rlhf.plugin.TrainerPlugin"
    )
    assert error_of(load_record, find("trainer", "plain")) == (
        "trainer 'plain' of rlhf-wrong 1.0: its config <class 'int'> is not an attrs class"
    )


def test_a_missing_requirement_of_a_record_is_named(install: Install) -> None:
    source = """
        import attrs
        from rlhf.plugin import TrainerPlugin
        Config = attrs.make_class("Config", {})
        plugin = TrainerPlugin(config=Config, trainer="a:b", requires=("rlhf-toy-extras>=2",))
    """
    groups = {"trainers": {"needy": "needy_plugin:plugin"}}
    install("rlhf-needy", groups, {"needy_plugin": source})
    assert error_of(load_record, find("trainer", "needy")) == (
        "trainer 'needy' of rlhf-needy 1.0 needs rlhf-toy-extras>=2; "
        "run `pip install 'rlhf-toy-extras>=2'`"
    )


def test_an_import_string_reaches_the_object_or_says_what_failed(toy: Path) -> None:
    assert load_object("rlhf.errors:RLHFError") is RLHFError
    assert error_of(load_object, "rlhf.errors:Gone") == (
        "rlhf.errors:Gone: no 'Gone' in rlhf.errors; correct rlhf.errors:Gone"
    )


def test_an_import_string_of_a_user_searches_the_current_folder_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_the_user.py").write_text("answer = 42\n")
    (tmp_path / "wave.py").write_text("raise ValueError('not ours')\n")
    assert load_user_object("beside_the_user:answer") == 42
    assert sys.path[-1] == str(tmp_path)
    assert load_user_object("wave:Error").__module__ == "wave"


def test_the_demo_is_in_the_folder_of_the_record(toy: Path) -> None:
    plugin = find("trainer", "toy")
    assert demo_file(plugin, load_record(plugin)) == toy / "toy.yaml"


if __name__ == "__main__":
    KNOWN.write_text(known_plugins())
