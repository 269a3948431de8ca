"""The command line: commands, exit codes, and what they must not import."""

import errno
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlhf.train.default_hooks
import rlhf.trainer  # noqa: F401  The fixture `install` hides torch.
from rlhf.commands.main import main
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import CORE_COMMANDS, find_command
from rlhf.request.reader import Request
from rlhf_devkit.distributions import WITH_WRONG_DEFAULTS, WRONG_DEFAULTS, Install

HEAVY = "torch transformers deepspeed peft datasets numpy rich safetensors torchdata"


def replace(monkeypatch: pytest.MonkeyPatch, module: str, name: str, act: Any) -> None:
    """Stand-ins for what the shell starts: the real ones import torch and have their own tests."""
    monkeypatch.setattr(f"{module}.{name}", act)


def test_run_hands_over_the_request_and_its_exit_code(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[Request] = []

    def run_command(request: Request) -> int:
        requests.append(request)
        return 143

    replace(monkeypatch, "rlhf.commands.records", "run_command", run_command)
    words = ["run", "toy", "--model", "m", "--data", "d", "--nproc", "2", "--resume"]
    assert main(words) == 143
    (request,) = requests
    assert (request.name, request.nproc, request.resume, request.overwrite) == ("toy", 2, "", False)
    assert request.argv == words
    assert request.config.model.path == "m"


@pytest.mark.parametrize(
    ("words", "module", "name"),
    [
        (
            ["export", "run/checkpoints/step-1", "out", "--role", "critic"],
            "rlhf.commands.records",
            "export_command",
        ),
        (["merge", "adapter", "out"], "rlhf.commands.merge", "merge_command"),
    ],
)
def test_the_other_commands_are_handed_over(
    toy: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], module: str, name: str
) -> None:
    given: list[str] = []

    def command(**options: str) -> int:
        given.extend(options.values())
        return 0

    replace(monkeypatch, module, name, command)
    assert main(words) == 0
    assert given == [word for word in words[1:] if word != "--role"]


def test_a_users_mistake_is_one_line_and_exit_code_2(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(request: Request) -> int:
        raise RLHFError("the disk is full: free some of it")

    replace(monkeypatch, "rlhf.commands.records", "run_command", full)
    for words, message in (
        (["run", "toy"], "the disk is full: free some of it"),
        (["run", "toy", "--toy.beta"], "--toy.beta needs a value; write --toy.beta VALUE"),
        (["run"], "the following arguments are required: NAME; see `rlhf run --help`"),
        ([], "the following arguments are required: COMMAND; see `rlhf --help`"),
        (["merge", "a"], "the following arguments are required: OUTPUT; see `rlhf merge --help`"),
        (["export", "a", "b", "c"], "unrecognized arguments: c; see `rlhf --help`"),
    ):
        assert main(words) == 2
        assert capsys.readouterr() == ("", f"error: {message}\n")


@pytest.mark.parametrize(
    "words",
    [
        ["run", "toy", "--model", "m", "--data", "d", "--output"],
        ["run", "toy", "--model", "m", "--data", "d", "--resume", "--output"],
        ["export", "run"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("address", ["s3://bucket/run", "file:///tmp/run"])
def test_an_output_that_is_an_address_is_one_line_and_writes_nothing(
    words: list[str],
    address: str,
    toy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main([*words, address]) == 2
    assert capsys.readouterr() == (
        "",
        f"error: cannot write to {address.partition('://')[0]}://; choose a local path "
        "(buckets: docs/observers.md)\n",
    )
    assert not any(Path().iterdir())


@pytest.mark.parametrize("words", [["config", "toy"], ["--version"]])
def test_an_output_on_a_full_disk_is_one_line(
    words: list[str],
    toy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("/dev/full").open("w") as output, redirect_stdout(output):
        assert main(words) == 2
    assert capsys.readouterr().err == (
        "error: cannot write to standard output (No space left on device); redirect it elsewhere\n"
    )


def test_a_process_without_streams_runs_as_any_other() -> None:
    command = [sys.executable, "-m", "rlhf", "--version"]
    for closed in ("1>&-", "2>&-"):
        done = subprocess.run(
            ["sh", "-c", f'"$@" {closed}', "sh", *command], capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_refusal_of_another_file_is_a_defect(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Request) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    replace(monkeypatch, "rlhf.commands.records", "run_command", fail)
    with pytest.raises(OSError, match="No space left on device"):
        main(["run", "toy"])


def test_a_current_folder_that_was_deleted_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert main(["run", "toy"]) == 2
    assert capsys.readouterr().err == (
        "error: the current folder no longer exists; change to another\n"
    )


def test_an_error_names_its_rank_unless_rank_0_reports_it(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, rank, message in (
        (RLHFError("no device 1"), "1", "error on rank 1: no device 1\n"),
        (SameOnAllRanks("the disk is full"), "1", ""),
        (SameOnAllRanks("the disk is full"), "0", "error: the disk is full\n"),
    ):

        def fail(request: Request, error: RLHFError = error) -> int:
            raise error

        monkeypatch.setenv("RANK", rank)
        replace(monkeypatch, "rlhf.commands.records", "run_command", fail)
        assert main(["run", "toy"]) == 2
        assert capsys.readouterr().err == message


def test_several_mistakes_are_listed_under_one_heading(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "toy", "--toy.bta", "1", "--batch", "0"]) == 2
    assert capsys.readouterr().err == (
        "error: 2 problems in the configuration\n"
        "  batch.size: must be > 0: 0\n"
        "  toy.bta: unknown setting; did you mean toy.beta?\n"
    )


def test_ctrl_c_is_exit_code_130_with_one_message_and_a_defect_raises(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(request: Request) -> int:
        raise KeyboardInterrupt

    def defective(request: Request) -> int:
        raise ZeroDivisionError

    replace(monkeypatch, "rlhf.commands.records", "run_command", interrupted)
    assert main(["run", "toy"]) == 130
    message = "error: interrupted; --resume continues from the last checkpoint, if there is one\n"
    assert capsys.readouterr().err == message
    monkeypatch.setenv("RLHF_PARENT", "1")
    assert main(["run", "toy"]) == 130
    assert capsys.readouterr().err == ""
    replace(monkeypatch, "rlhf.commands.records", "run_command", defective)
    with pytest.raises(ZeroDivisionError):
        main(["run", "toy"])


def test_config_prints_yaml_without_asking_for_model_and_data(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "toy", "--toy.beta", "0.5"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert (tree["toy"]["beta"], tree["optim"]["lr"], tree["model"]["path"]) == (0.5, 1e-6, "")


@pytest.mark.parametrize("command", ["run", "config"])
def test_help_after_a_name_lists_its_settings(
    toy: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "toy", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: rlhf {command} toy [CONFIG.yaml] [--section.field VALUE ...]\n")
    for part in ("--nproc N", "# Strength of the toy.", "  beta: 0.1", "# Peak learning rate."):
        assert part in text
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--resume [step-N]" in capsys.readouterr().out


def test_a_default_that_is_not_a_setting_names_the_plugin(
    toy: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = {"toy_defaults": WITH_WRONG_DEFAULTS}
    install("rlhf-more", {"trainers": {"more": "toy_defaults:plugin"}}, modules)
    assert main(["config", "more"]) == 2
    assert capsys.readouterr().err == f"error: trainer 'more' of rlhf-more 1.0 {WRONG_DEFAULTS}\n"


@pytest.mark.parametrize("words", ["--help", "config toy --backend plain", "--version"])
def test_a_closed_pipe_is_not_an_error(toy: Path, words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "rlhf", *words.split()],
        env=environment(toy) | {"PYTHONUNBUFFERED": ""},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_argument_of_deepspeeds_launcher_is_accepted(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--local_rank=1", "config", "toy"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["toy"]["beta"] == 0.1
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "local" not in capsys.readouterr().out


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that sees the distributions in `folder`."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--help", 0),
        ("--version", 0),
        ("run --help", 0),
        ("config toy --backend plain", 0),
        ("run toy --backend plain --toy.bta 1", 2),
        ("run tyo", 2),
        ("run toy --backend plain --model m --data d --output s3://bucket/run", 2),
    ],
)
def test_the_light_side_imports_nothing_heavy(toy: Path, words: str, code: int) -> None:
    program = (
        "import sys\nfrom rlhf.commands.main import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code\n"
        f"assert not set(sys.modules) & set('{HEAVY}'.split())\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words.split()],
        env=environment(toy),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: ") == (code == 2)


def test_files_are_utf_8_and_every_text_can_be_printed_in_any_locale(toy: Path) -> None:
    file = toy / "config.yaml"
    file.write_text("output: gr\u00f6\u00dfe", encoding="utf-8")
    program = (
        "import sys\nfrom rlhf.commands.main import main\n"
        "code = main(sys.argv[1:])\nprint('# \\u65e5')\nsys.exit(code)"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, "config", "toy", str(file), "--backend", "plain"],
        env=environment(toy) | ascii_only,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["output"] == "gr\u00f6\u00dfe"
    assert done.stdout.endswith("# \\u65e5\n")


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("rlhf-core ")


HELLO = """
    from rlhf.plugin import CommandPlugin, positive

    def arguments(parser):
        parser.add_argument("--times", type=positive(int), default=1)

    def greet(request, times):
        print(request.name, request.config.toy.beta, times, request.argv)
        return 7

    plugin = CommandPlugin(
        help="greet", run="hello_plugin:greet", arguments=arguments, takes="run"
    )
    words = CommandPlugin(help="print words", run="hello_plugin:lost")
"""


@pytest.mark.parametrize(
    "words",
    ["--times 3 toy --toy.beta 0.5 --model m --data d", "toy --toy.beta 0.5 --times=3 --nproc 1"],
)
def test_a_command_of_another_distribution_gets_the_request_and_its_own_options(
    toy: Path, install: Install, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    install("rlhf-hello", {"commands": {"hello": "hello_plugin:plugin"}}, {"hello_plugin": HELLO})
    assert main(["hello", *words.split()]) == 7
    rest = [word for word in words.split() if word not in ("--times", "3", "--times=3")]
    assert capsys.readouterr().out == f"toy 0.5 3 {['run', *rest]}\n"
    assert main(["hello", "toy", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: rlhf hello toy [CONFIG.yaml] ")
    assert "--times TIMES" in text
    assert "# Strength of the toy." in text


def test_a_broken_command_hurts_only_itself(
    toy: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {"hello": "hello_plugin:plugin", "lost": "hello_plugin:words", "gone": "gone:plugin"}
    groups = {"commands": commands | {"run": "hello_plugin:plugin"}}
    install("rlhf-hello", groups, {"hello_plugin": HELLO})
    reserved = "its name 'run' is reserved for core"
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "\n  run        train: rlhf run sft " in text
    assert "\nrlhf-hello: What rlhf-hello is\n  gone\n  hello\n  lost\n" in text
    assert f"\n  run        {reserved}\n" in text
    assert "\nnot installed:\n  cache      pip install rlhf-tools\n" in text
    assert main(["config", "toy"]) == 0
    capsys.readouterr()
    gone = (
        "cannot be imported: ModuleNotFoundError: No module named 'gone' "
        "(`python -c 'import gone'` shows where)"
    )
    lost = "no 'lost' in hello_plugin; correct run="
    for name, problem in (("gone", f" {gone}"), ("lost", f": {lost}")):
        assert main([name]) == 2
        message = f"error: command '{name}' of rlhf-hello 1.0{problem}\n"
        assert capsys.readouterr().err == message


def test_an_unknown_command_gets_a_near_match_and_the_installed_names(
    toy: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("rlhf-hello", {"commands": {"hello": "hello_plugin:plugin"}})
    available = f"available: {', '.join(CORE_COMMANDS)}, hello (rlhf-hello 1.0)"
    assert main(["rnu"]) == 2
    assert capsys.readouterr().err == (
        f"error: command 'rnu' is not installed (did you mean 'run'?); {available}\n"
    )


def test_each_file_with_a_record_is_a_command_of_core() -> None:
    for name in CORE_COMMANDS:
        record = load_record(find_command(name))
        assert load_object(record.run).__name__ == f"{name}_command"
