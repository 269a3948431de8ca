"""`rlhf doctor`: findings of the machine, the disks and the packages, the table and the exit
code."""

import json
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from rlhf.cli import main
from rlhf.hookspecs import Finding
from rlhf_tools import doctor, engines

LIBAIO = Finding(
    subject="async_io",
    here="libaio is missing",
    state="optional",
    feature="NVMe",
    remedy="apt install libaio-dev",
)


@pytest.fixture
def only_backends(monkeypatch, tmp_path):
    """Only one finding beside the backends', and no file in a folder of the user's."""
    monkeypatch.setattr(doctor, "FOLDERS", {"run folders": (tmp_path / "runs", "set output")})
    monkeypatch.setattr(doctor, "_versions", lambda: [Finding(subject="versions", here="1.0")])
    for name in ("_packages", "_kernels", "describe_machine"):
        monkeypatch.setattr(doctor, name, list)
    monkeypatch.setattr(doctor, "engine_findings", lambda config: [])

    def backends(*found):
        monkeypatch.setattr(doctor, "_backends", lambda: found)

    return backends


def test_a_feature_that_lacks_something_is_shown_with_the_remedy(only_backends, capsys):
    only_backends(LIBAIO)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok        versions         1.0"
    assert lines[1].startswith("ok        run folders      ")
    assert lines[1].endswith(" MB/s")
    assert lines[2:] == [
        "optional  async_io         libaio is missing",
        "                           for NVMe: apt install libaio-dev",
    ]


def test_a_missing_requirement_of_every_run_gives_exit_code_2(only_backends, capsys):
    missing = Finding(subject="backend", here="none", state="missing", remedy="pip install it")
    only_backends(LIBAIO, missing)
    assert main(["doctor", "--json"]) == 2
    *_, optional, last = json.loads(capsys.readouterr().out)
    assert optional["remedy"] == "apt install libaio-dev"
    assert last == {
        "subject": "backend",
        "here": "none",
        "state": "missing",
        "feature": "",
        "remedy": "pip install it",
    }


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        ("file/runs", "cannot write to {place}/file/tmp"),
        ("/proc/runs", "[Errno 2] No such file or directory: '/proc/"),
    ],
)
def test_a_folder_that_cannot_be_written_is_missing(
    only_backends, monkeypatch, tmp_path, capsys, folder, problem
):
    only_backends()
    (tmp_path / "file").touch()
    monkeypatch.setattr(doctor, "FOLDERS", {"run folders": (tmp_path / folder, "set output")})
    assert main(["doctor"]) == 2
    _, refused, remedy = capsys.readouterr().out.splitlines()
    assert refused.startswith(f"missing   run folders      {problem.format(place=tmp_path)}")
    assert remedy.strip() == "set output"


def test_the_compiler_is_reported_with_the_feature_that_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {each.subject: each for each in doctor.describe_machine()}
    assert found["compiler"].state == ("ok" if shutil.which("c++") else "optional")
    assert found["host"].here.endswith(" GiB of memory")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor._compiler() == Finding(
        subject="compiler",
        here="no-such-compiler is missing",
        state="optional",
        feature="kernels that Triton and torch compile",
        remedy="apt install g++",
    )


def test_a_driver_that_torch_cannot_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "output_of", lambda command: "580.82.07")
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: None)
    found = doctor._devices()
    assert found.state == "optional"
    assert found.here.startswith("NVIDIA driver 580.82.07, but torch ")


def test_too_little_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_SHARED", 2**60)
    assert doctor._shared_memory().remedy == "docker run --shm-size 8g"


BROKEN = """\
Metadata-Version: 2.4
Name: rlhf-toy
Version: 1.0
Summary: A backend that cannot be imported
Requires-Dist: not-there>=1.2
Requires-Dist: extra-of-another>=2; extra == 'fast'
"""


def test_an_unsatisfied_requirement_is_an_error_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rlhf_toy-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(BROKEN)
    (folder / "entry_points.txt").write_text("[rlhf.backends]\ntoy = toy_backend:plugin\n")
    (tmp_path / "toy_backend.py").write_text("import not_there")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = [each for each in doctor._packages() if each.subject == "rlhf-toy"]
    assert (found.subject, found.state) == ("rlhf-toy", "missing")
    assert found.here == "not-there>=1.2 is not installed"
    assert found.remedy == "pip install 'not-there>=1.2'"
    (broken,) = [each for each in doctor._backends() if each.subject == "toy"]
    assert broken.here.startswith("backend 'toy' of rlhf-toy 1.0 cannot be imported: Mod")
    assert (broken.state, broken.remedy) == ("missing", "rlhf plugins check")


def test_without_a_backend_no_run_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    (found,) = doctor._backends()
    assert found.here == "no backend is installed; run `pip install rlhf-plugin-deepspeed`"
    assert (found.state, found.remedy) == ("missing", "pip install rlhf-plugin-deepspeed")


def test_every_extra_of_core_has_its_feature() -> None:
    extras = {*metadata.metadata("rlhf-core").get_all("Provides-Extra")}
    assert sorted(extras - {"all"}) == [*doctor.FEATURES]


def test_kernels_that_are_missing_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_kernels", lambda: None)
    assert list(doctor._kernels()) == [
        Finding(
            subject="kernels",
            here="none; layers run in plain torch",
            state="optional",
            feature="fused and compiled layers on CUDA",
            remedy="pip install rlhf-kernels",
        )
    ]


ENGINE = """\
from attrs import frozen

from rlhf.hookspecs import Finding
from rlhf.plugin import RolloutPlugin

@frozen
class Settings:
    place: str = "default"

    def diagnose(self):
        if self.place == "broken":
            raise ValueError("it cannot look")
        return [Finding(subject="toy", here=self.place)]

plugin = RolloutPlugin(engine="toy_engine:Toy", config=Settings)
"""


@pytest.fixture
def toy_engine(tmp_path, monkeypatch):
    """An installed generation engine `toy-engine`, whose settings have `diagnose`."""
    folder = tmp_path / "site" / "rlhf_toy-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(BROKEN.partition("Requires")[0])
    (folder / "entry_points.txt").write_text("[rlhf.rollouts]\ntoy-engine = toy_engine:plugin\n")
    (tmp_path / "site" / "toy_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path / "site")


def of_toy(config) -> Finding:
    (found,) = [each for each in engines.engine_findings(config) if each.subject[:3] == "toy"]
    return found


def recipe(tmp_path: Path, place: str) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"rollouts: {{engine: toy-engine, toy-engine: {{place: {place}}}}}\n")
    return str(path)


def test_a_generation_engine_adds_findings_by_its_settings(toy_engine, tmp_path) -> None:
    assert of_toy(None).here == "default"
    assert of_toy(engines.read_words(["sft"])).here == "default"
    assert of_toy(engines.read_words(["sft", recipe(tmp_path, "here")])).here == "here"


def test_an_engine_that_cannot_look_is_a_finding(toy_engine, tmp_path) -> None:
    found = of_toy(engines.read_words(["sft", recipe(tmp_path, "broken")]))
    assert (found.subject, found.here, found.state) == (
        "toy-engine", "it cannot look", "optional",
    )  # fmt: skip
    assert (found.feature, found.remedy) == ("rollouts.engine toy-engine", "rlhf plugins check")


def test_settings_of_the_doctor_are_read_as_those_of_a_run() -> None:
    words = ["--optim.weight-decay", "0.5", "--output=a # b", "--overwrite", "--nproc", "2"]
    config = engines.read_words(["sft", *words])
    assert (config.optim.weight_decay, config.output) == (0.5, "a # b")


def test_the_doctor_takes_a_configuration(only_backends, monkeypatch, capsys) -> None:
    only_backends()

    def engine(config) -> list[Finding]:
        return [Finding(subject="engine", here=config.rollouts.engine)]

    monkeypatch.setattr(doctor, "engine_findings", engine)
    assert main(["doctor", "--json", "sft", "--rollouts", "embedded"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["here"] == "embedded"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--rollouts.lag",), "--rollouts.lag needs a value; write --rollouts.lag VALUE"),
        (("a.yaml", "b.yaml"), "unexpected argument 'b.yaml': the config file is already a.yaml"),
        (("--rollouts.nothing", "1"), "rollouts.nothing"),
    ],
)
def test_words_that_are_no_configuration_are_an_error(words, problem, capsys) -> None:
    assert main(["doctor", "sft", *words]) == 2
    assert problem in capsys.readouterr().err
