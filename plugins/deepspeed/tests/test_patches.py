"""Every patch of DeepSpeed: its targets exist with the sources it was tested with, it is refused
where they do not, and it ends with its run."""

import ast
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from patch_sources import DIGESTS, READ, TARGETS, find, installed
from torch.nn import functional
from uneven import case_of

import rlhf_plugin_deepspeed
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf_devkit.problem import configure, follow, shape, start
from rlhf_plugin_deepspeed import zero
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, Resolved
from rlhf_plugin_deepspeed.patches import table
from rlhf_plugin_deepspeed.patches.install import fits, parameters, path_of, replace, run_scope
from rlhf_plugin_deepspeed.patches.table import NEWEST, OLDEST, PATCHES, names_for
from rlhf_plugin_deepspeed.versions import installed_version, older


@pytest.mark.parametrize("target", [item for item in TARGETS if item.startswith("deepspeed.")])
def test_the_source_of_each_target_is_that_of_the_tested_versions(target):
    found = find(target, installed())
    if found is None and older(installed_version(), READ.get(target, OLDEST)):
        return
    assert found is not None, f"{target} is missing"
    digest, names = found
    expected = parameters(target)
    assert expected is None or fits(expected, names or []), f"{target} takes {names}"
    versions = json.loads(DIGESTS.read_text())[target]
    assert digest in versions.values(), (
        f"the source of {target} in deepspeed {installed_version()} is not that of a tested "
        f"version ({', '.join(versions)}); read what changed, then run patch_sources.py"
    )


def test_both_ends_of_the_tested_range_are_known():
    for target, versions in json.loads(DIGESTS.read_text()).items():
        assert READ.get(target, OLDEST) in versions
        assert NEWEST in versions


def test_torchs_linear_is_still_in_its_module():
    assert [target for target in TARGETS if not target.startswith("deepspeed.")] == [
        "torch.nn.functional:linear"
    ]
    assert callable(functional.linear)


def test_every_private_name_of_deepspeed_is_a_target():
    private = set()
    for path in Path(rlhf_plugin_deepspeed.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                private.add(ast.unparse(node))
            match node:
                case ast.Call(ast.Name("getattr"), [_, ast.Constant(str(name)), *_]):
                    private |= {name} if re.match("_[^_]", name) else set()
    known = {path_of(target)[-1] for target in TARGETS}
    others = re.compile(r"self\.|torch\.|nn\.|cpp_extension\.")
    names = {name.rpartition(".")[2] for name in private if not others.match(name)}
    assert names - known == set()


def renamed(attribute):
    """What a run says where DeepSpeed's reduction has another name."""
    function = getattr(DeepSpeedZeroOptimizer, attribute)
    delattr(DeepSpeedZeroOptimizer, attribute)
    backend = DeepSpeedBackend()
    try:
        start(backend, case_of({"stage": 1}))
    except RLHFError as error:
        return str(error)
    finally:
        setattr(DeepSpeedZeroOptimizer, attribute, function)
        backend.close_mesh(Mesh())
    return ""


def test_a_renamed_reduction_is_an_error_and_no_smaller_gradient(pair):
    remedy = f"install deepspeed {OLDEST} to {NEWEST}"
    for text in pair.run(renamed, "average_tensor"):
        assert text == (
            f"deepspeed {installed_version()} does not fit the patch gradient-order: "
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.average_tensor is "
            f"missing; {remedy}"
        )
    if names_for(configure(DeepSpeedConfig()), Resolved(stage=1)).count("check-by-norm"):
        remedy = f"install deepspeed {PATCHES['check-by-norm'].oldest} to {NEWEST}"
        for text in pair.run(renamed, "scaled_global_norm"):
            assert text.endswith(f"is missing; {remedy} or set deepspeed.patches to correctness")


def test_other_parameters_are_an_error():
    module = ModuleType("module")
    module.build_shm_op = lambda device: None
    with pytest.raises(RLHFError) as error:
        replace("no-shm-build", module, build_shm_op=lambda: None)
    assert str(error.value) == (
        f"deepspeed {installed_version()} does not fit the patch no-shm-build: "
        f"deepspeed.comm.torch:build_shm_op takes (device); install deepspeed {OLDEST} to {NEWEST}"
    )


def owner_and_name(target):
    """The module or class of a target, and the name that it has there."""
    module, *classes, name = path_of(target)
    owner = import_module(module)
    for each in classes:
        owner = getattr(owner, each)
    private = classes and name.startswith("__")
    return owner, f"_{owner.__name__}{name}" if private else name


def patched(settings):
    """Names of targets of modules and classes that differ from before a run, during the run and
    after it."""
    run_scope.close()  # An earlier test may have left its run open in this process.
    owned = [owner_and_name(target) for patch in PATCHES.values() for target in patch.targets]
    before = [(owner, name, vars(owner).get(name)) for owner, name in owned]

    def changed():
        return {name for owner, name, value in before if vars(owner).get(name) is not value}

    backend = DeepSpeedBackend()
    _, _, mesh = follow(backend, case_of(settings, steps=1))
    during = changed()
    backend.close_mesh(mesh)
    return during, changed()


RELEASE = "_PartitionedParameterCoordinator__params_to_release"
ALWAYS = {"build_shm_op", "cdb", "_WORLD_GROUP", "FWD_MODULE_STACK", "linear", RELEASE}


def test_patches_of_modules_end_with_their_run(single):
    faster = {"enable_nvtx", "iter_params", "is_deepcompile_supported"}
    assert single.run(patched, {"stage": 3}) == [(ALWAYS | faster, set())]
    assert single.run(patched, {"stage": 3, "patches": "correctness"}) == [(ALWAYS, set())]


def without_compiler(settings):
    """A run that fails if DeepSpeed compiles or loads an operator."""
    backend = DeepSpeedBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(OpBuilder, "load")
        _, _, mesh = follow(backend, case_of(settings, steps=1))
    backend.close_mesh(mesh)


@pytest.mark.parametrize("patches", ["all", "correctness"])
def test_no_run_waits_for_a_compiler_or_for_the_lock_of_one_that_was_killed(single, patches):
    single.run(without_compiler, {"stage": 2, "patches": patches})


def unclosed(settings):
    """Two runs in a process, of which the first has failed without `close_mesh`."""
    backend = DeepSpeedBackend()
    for _ in range(2):
        _, _, mesh = follow(backend, case_of(settings, steps=1))
    backend.close_mesh(mesh)


def test_patches_of_a_run_that_was_not_closed_do_not_stop_the_next(single):
    single.run(unclosed, {"stage": 0})


IMPORT = """
import deepspeed, logging, sys, warnings
from importlib import import_module
import rlhf.trainer
modules = [import_module(name) for name in sys.argv[1:]]
classes = [value for module in modules for value in vars(module).values() if type(value) is type]
def state():
    return [[dict(vars(owner)) for owner in (*modules, *classes)], [*warnings.filters],
            [*logging.getLogger("DeepSpeed").filters], sys.modules.get("mlflow", 0)]
own = state()
import rlhf_plugin_deepspeed.backend
print(state() == own)
"""


def test_an_import_patches_nothing():
    command = [sys.executable, "-c", IMPORT, *{path_of(target)[0] for target in TARGETS}]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "True"


def names(stage=3, *, version=NEWEST, states="fp32", offload=False, setting="all"):
    config = configure(DeepSpeedConfig(patches=setting), states=states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "installed_version", lambda: version)
        return names_for(config, Resolved(stage=stage, offload_optimizer=offload))


def test_a_newer_deepspeed_gets_only_the_patches_for_correctness(monkeypatch):
    needed = names(setting="correctness")
    assert needed == names(version="0.19.9") != names()
    assert {PATCHES[name].kind for name in needed} == {"correctness"}
    for module in (table, zero):
        monkeypatch.setattr(module, "installed_version", lambda: "0.19.9")
    run = configure(DeepSpeedConfig(stage=3))
    plan = zero.plan(run, Mesh(), shape())
    assert plan.patches == needed
    assert plan.summary.endswith(
        ", correctness patches only (deepspeed 0.19.9 is newer than 0.19.8)"
    )
    assert "memory_efficient_linear" not in plan.settings["zero_optimization"]


def test_a_patch_is_for_its_stages_states_and_place():
    assert "no-norm" in names(states="bf16")
    assert "no-norm" not in names()
    assert "no-master-copy" in names(1, states="bf16")
    assert "no-master-copy" not in names(1)
    assert "check-by-norm" in names(1)
    assert "check-by-norm" not in names(1, offload=True)
    assert "check-by-norm" not in names(1, version="0.19.7")
    assert "gradient-order" not in names(3)


@pytest.mark.skipif(older(installed_version(), "0.19.8"), reason="before there was no such setting")
def test_states_in_bf16_turn_deepspeeds_norm_off_by_its_settings(single):
    assert single.run(norm_settings) == [(False, False, 0.0)]


def norm_settings():
    """Whether DeepSpeed checks the gradient and computes its norm, and how it clips."""
    backend = DeepSpeedBackend()
    case = case_of({"stage": 1}, dtype="bf16", states="bf16")
    mesh, engine, _ = start(backend, case)
    optimizer = engine.deepspeed.optimizer
    backend.close_mesh(mesh)
    return optimizer.check_grad_overflow, optimizer.compute_grad_norm, optimizer.clip_grad
