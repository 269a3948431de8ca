"""Who may import whom, held by import-linter: plugins -> core, never back, never across; DeepSpeed
in its plugin alone."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def plugin_packages() -> list[str]:
    """The import names of all folders under plugins/."""
    return sorted(path.name for path in ROOT.glob("plugins/*/src/*") if path.is_dir())


def contracts() -> str:
    """import-linter's configuration; nothing lists the plugins by hand."""
    plugins = plugin_packages()
    others = [name for name in plugins if name != "rlhf_plugin_deepspeed"]
    lines = ["[importlinter]", "include_external_packages = True", "root_packages =", "    rlhf"]
    lines += [f"    {name}" for name in plugins]
    lines += _contract("core", "forbidden", source=["rlhf"], forbidden=plugins)
    lines += _contract("deepspeed", "forbidden", source=["rlhf", *others], forbidden=["deepspeed"])
    lines += _contract("plugins", "independence", modules=plugins)
    return "\n".join(lines) + "\n"


def _contract(name: str, kind: str, **modules: list[str]) -> list[str]:
    keys = {"source": "source_modules", "forbidden": "forbidden_modules", "modules": "modules"}
    lines = [f"[importlinter:contract:{name}]", f"name = {name}", f"type = {kind}"]
    for key, names in modules.items():
        lines += [f"{keys[key]} =", *(f"    {each}" for each in names)]
    return lines


def check(configuration: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "lint-imports"
    command = [str(program), "--config", str(configuration), "--no-cache"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_imports_go_from_plugins_to_core_alone(tmp_path: Path) -> None:
    configuration = tmp_path / "importlinter.ini"
    configuration.write_text(contracts())
    done = check(configuration)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Contracts: 3 kept, 0 broken", done.stdout)


def test_the_check_finds_a_breach(tmp_path: Path) -> None:
    broken = contracts() + "\n".join(
        _contract("breach", "forbidden", source=["rlhf"], forbidden=["pluggy"])
    )
    configuration = tmp_path / "importlinter.ini"
    configuration.write_text(broken)
    assert check(configuration).returncode == 1
