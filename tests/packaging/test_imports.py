"""Which module may import which, held by import-linter: the rooms of core are a ladder, no modules
import each other in a circle, plugins import only core and the libraries that they declare, and
only the DeepSpeed plugin imports DeepSpeed."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = (
    *("cli", "commands", "api", "preview", "train", "memory", "reference", "contract"),
    *("kernels", "rollouts", "scorer", "readouts", "model"),
    *("trainer", "engine", "formats", "data", "folder", "request"),
    *("registry", "launch"),
    *("plugin", "hookspecs", "config", "errors"),
    *("sharding", "devices", "forwards"),
)
"""The rooms and public modules of core from top to bottom. Each imports only from those below it,
also for type checkers."""
WITH_LIBRARY = {
    "rlhf-demo": "rlhf_demo", "rlhf-rollouts": "rlhf_rollouts.**", "rlhf-rows": "rlhf_rows",
}  # fmt: skip
"""Distributions with plugins that have a library too, and the modules that others import."""
WITHOUT_TORCH = "rlhf.hookspecs -> rlhf.engine"
"""The hooks are documented in a module without torch, which names the types of the engine for type
checkers only."""


def plugin_packages() -> list[str]:
    """Return the import names of all plugins in the folder plugins/."""
    return sorted(path.name for path in ROOT.glob("plugins/*/src/*") if path.is_dir())


def imports_of_libraries() -> list[str]:
    """Return the imports from one distribution in plugins/ to another that are allowed: it declares
    the other, which is a library: it has no plugin of its own, or is one of WITH_LIBRARY."""
    described = {
        path.parent: tomllib.loads(path.read_text())["project"]
        for path in ROOT.glob("plugins/*/pyproject.toml")
    }
    package = {folder: next(folder.glob("src/*")).name for folder in described}
    libraries = {
        project["name"]: package[folder]
        for folder, project in described.items()
        if "entry-points" not in project
    } | WITH_LIBRARY
    return sorted(
        f"{package[folder]}.** -> {library}"
        for folder, project in described.items()
        for name, library in libraries.items()
        if any(re.match(rf"{name}\b(?!-)", line) for line in project["dependencies"])
    )


def contracts() -> str:
    """Return import-linter's configuration."""
    plugins = plugin_packages()
    others = [name for name in plugins if name != "rlhf_plugin_deepspeed"]
    lines = ["[importlinter]", "include_external_packages = True"]
    lines += ["root_packages =", "    rlhf"]
    lines += [f"    {name}" for name in plugins]
    lines += _contract("core", "forbidden", source=["rlhf"], forbidden=plugins)
    lines += _contract("deepspeed", "forbidden", source=["rlhf", *others], forbidden=["deepspeed"])
    lines += _contract("plugins", "independence", modules=plugins)
    lines += ["ignore_imports =", *(f"    {line}" for line in imports_of_libraries())]
    # Who declares rlhf-rollouts may need only its engine.
    lines += ["unmatched_ignore_imports_alerting = none"]
    lines += _contract("rooms", "layers", layers=list(ROOMS))
    lines += ["containers =", "    rlhf", "exhaustive = True"]
    lines += ["exhaustive_ignores =", "    __main__", "ignore_imports =", f"    {WITHOUT_TORCH}"]
    lines += _contract("circles", "acyclic_siblings", ancestors=["rlhf", *plugins])
    lines += ["ignore_imports =", f"    {WITHOUT_TORCH}"]
    return "\n".join(lines) + "\n"


def _contract(name: str, kind: str, **modules: list[str]) -> list[str]:
    keys = {"source": "source_modules", "forbidden": "forbidden_modules"}
    lines = [f"[importlinter:contract:{name}]", f"name = {name}", f"type = {kind}"]
    for key, names in modules.items():
        lines += [f"{keys.get(key, key)} =", *(f"    {each}" for each in names)]
    return lines


def check(configuration: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter."""
    program = Path(sys.executable).parent / "lint-imports"
    command = [str(program), "--config", str(configuration), "--no-cache"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_imports_go_down_the_rooms_and_from_plugins_to_core(tmp_path: Path) -> None:
    configuration = tmp_path / "importlinter.ini"
    configuration.write_text(contracts())
    done = check(configuration)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Contracts: 5 kept, 0 broken", done.stdout)


def test_a_plugin_imports_only_libraries_that_it_declares() -> None:
    assert [each for each in imports_of_libraries() if not each.endswith("rlhf_demo")] == [
        "rlhf_devkit.** -> rlhf_backend_torch",
        "rlhf_devkit.** -> rlhf_rollouts.**",
        "rlhf_devkit.** -> rlhf_rows",
        "rlhf_plugin_deepspeed.** -> rlhf_optim",
        "rlhf_plugin_dpo.** -> rlhf_rows",
        "rlhf_plugin_grpo.** -> rlhf_rollouts.**",
        "rlhf_plugin_ilql.** -> rlhf_rows",
        "rlhf_plugin_kd.** -> rlhf_distill",
        "rlhf_plugin_kd.** -> rlhf_rollouts.**",
        "rlhf_plugin_kd.** -> rlhf_rows",
        "rlhf_plugin_kto.** -> rlhf_rows",
        "rlhf_plugin_ppo.** -> rlhf_rollouts.**",
        "rlhf_plugin_prm.** -> rlhf_rows",
        "rlhf_plugin_rm.** -> rlhf_rows",
        "rlhf_plugin_sft.** -> rlhf_rows",
        "rlhf_rollouts.** -> rlhf_rows",
        "rlhf_serve.** -> rlhf_rows",
        "rlhf_vision.** -> rlhf_rows",
    ]


def test_only_the_gateway_loads_kernels() -> None:
    core = ROOT.glob("core/src/**/*.py")
    found = {path.name for path in core if "find_kernels" in path.read_text()}
    assert found == {"accelerated.py", "installed.py"}


def test_only_the_gateways_load_generation_engines() -> None:
    core = ROOT.glob("core/src/**/*.py")
    found = {path.name for path in core if "load_engine" in path.read_text()}
    assert found == {"context.py", "rollouts.py"}


def test_the_check_finds_an_import_upwards(tmp_path: Path) -> None:
    upside_down = contracts().replace("    config\n    errors\n", "    errors\n    config\n")
    configuration = tmp_path / "importlinter.ini"
    configuration.write_text(upside_down)
    done = check(configuration)
    assert done.returncode == 1
    assert "rooms BROKEN" in done.stdout


def test_core_names_no_attribute_of_deepspeed() -> None:
    core = ROOT / "core" / "src" / "rlhf"
    named = [path for path in core.rglob("*.py") if re.search(r"\bds_\w", path.read_text())]
    assert named == []


def test_forwards_of_modules_are_replaced_in_one_place() -> None:
    files = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    assignment = re.compile(r'\.forward = |\["forward"\] = |setattr\([^,]+, "forward"')
    assert [path.name for path in files if assignment.search(path.read_text())] == ["forwards.py"]
