"""The blocks of docs/tutorial.md work one after the other, in an empty folder."""

import re
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from served import Served, serving

from doc_blocks import FENCED, commands, in_place
from rlhf_devkit.ranks import Ranks
from sft_runs import Inputs

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
SHORT = {"step-000100": "step-000004", "stop_at 50": "stop_at 2"}
"""In a short run: what the commands say, and what they say instead."""
BEARER = "Bearer secret"


@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_the_tutorial_works_from_the_first_block_to_the_last(
    short: bool, inputs: Inputs, one: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(inputs.model, tmp_path / "Qwen" / "Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    with ExitStack() as stack:
        server: Served | None = None
        for match in FENCED.finditer(text):
            if match[1] == "python":
                exec(compile(match[2], "tutorial", "exec"), {"__name__": "tutorial"})
                for path in tmp_path.glob("*.jsonl") if short else ():
                    path.write_text("".join(path.read_text().splitlines(keepends=True)[:128]))
            elif match[1] == "yaml":
                name = re.findall(r"`(\w+\.yaml)`:\s*$", text[: match.start()])[-1]
                Path(name).write_text(match[2])
            elif match[1] == "bash":
                for command in commands(match[2]):
                    server = run(command, server, short, inputs, one, stack)


def run(
    command: str, server: Served | None, short: bool, inputs: Inputs, one: Ranks, stack: ExitStack
) -> Served | None:
    """Run a command of the tutorial; return the server of its last section once it is started."""
    for old, new in SHORT.items() if short else ():
        command = command.replace(old, new)
    if server:
        command = command.replace("http://127.0.0.1:8000", server.url)
    match shlex.split(command):
        case ["python3" | "source" | "pip", *_]:
            pass  # The environment of the tests has the distributions.
        case ["rlhf", "serve", folder, *rest] if folder != "--check":
            server = stack.enter_context(serving(folder, *rest, folder=Path.cwd()))
        case ["curl", "-s", url, *_, body]:
            assert server
            answer = server.post(url.removeprefix(server.url), body.encode(), authorization=BEARER)
            assert answer.status == 200
        case ["rlhf", *words]:
            if short and words[0] == "run":
                words += ["--train.steps", "4", "--checkpoint.every", "2"]
            place, cache = str(Path.cwd()), str(inputs.cache)
            assert one.run(in_place, words, place, cache, timeout=600) == [(0, "")], words
        case _:
            pytest.fail(f"add a case that tests {command}")
    return server
