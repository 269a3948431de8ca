"""Every change that we make to transformers, torch, Liger, flash-linear-attention and Python's
importing, with its reason.
Those of DeepSpeed are in the DeepSpeed plugin's own table."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

from wheel_sites import ROOT

OF_THE_PROCESS = ("os", "sys")
"""Modules whose attributes are state of the process."""
FILES = [
    path
    for path in sorted([*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
    if "deepspeed" not in str(path) and "devkit" not in str(path)
]


@frozen(kw_only=True)
class Patch:
    """A change of a library's behaviour."""

    file: str
    """Where we make it."""
    target: str
    """What is replaced or set, as the file writes it."""
    library: str
    """The library, and the versions for which it is made."""
    reason: str
    gain: str
    """As measured; "correctness" where results or runs need it."""


PATCHES = (
    Patch(
        file="loading.py", target="core_model_loading._materialize_copy",
        library="transformers that have it with the arguments tensor, device and dtype",
        reason="weights go to an accelerator through pinned memory, while a model is loaded",
        gain="0.63 -> 0.31 s to load 3.1 GB on one H200",
    ),
    Patch(
        file="recurrent.py", target="functions[name]",
        library="transformers, the modules of a family with recurrent layers",
        reason="its convolutions and scans are functions of the module, and none of its arguments "
        "sets the initial state of an answer",
        gain="a prompt is computed once for all its answers, and no padding",
    ),
    Patch(
        file="liger.py", target="liger_kernel.utils.PEFT_AVAILABLE", library="liger-kernel",
        reason="its kernels are imported without peft, but a plugin may use its models, which read "
        "this",
        gain="correctness",
    ),
    Patch(
        file="fused.py", target="family[ROTARY]", library="transformers, the module of a family",
        reason="the rotary embedding is a function of the module and no method of a layer",
        gain="with fused norms and gates 100 -> 30 ms a step",
    ),
    Patch(
        file="towers.py", target="family[ROTARY]", library="transformers, the module of a family",
        reason="the rotary embedding of a tower is a function of the module, too",
        gain="with patches as one product 683 -> 635 ms a step of dpo with images, in two calls",
    ),
    Patch(
        file="images.py", target="family[name]",
        library="transformers, the modules of families that read images",
        reason="a tower computes indices from the sizes of images by functions of the module, "
        "which read the sizes from the device",
        gain="9 of the 28 waits of the host in a micro-batch of Qwen3-VL",
    ),
    Patch(
        file="images.py", target="family[MASKS]",
        library="transformers, the modules of Gemma 3 and Gemma 4",
        reason="this function of the module asks the device three times whether a padded row is "
        "several sequences",
        gain="3 of the 10 waits of the host in a pass of Gemma 4 on padded rows",
    ),
    Patch(
        file="scans.py", target="tuner.run", library="flash-linear-attention 0.6",
        reason="its kernels run in the configurations that we recorded, which it would look up by "
        "all arguments at every launch, and time for those that it does not find",
        gain="445 -> 272 us of the host for the forward pass of a scan",
    ),
    Patch(
        file="fla_parts.py", target="_states.prepare_chunk_offsets",
        library="flash-linear-attention 0.6",
        reason="its functions of states read the number of chunks from the device",
        gain="6 waits of the host in each layer of Mamba 2 with shared prompts",
    ),
    Patch(
        file="compiler.py", target="dynamo.recompile_limit", library="torch",
        reason="one function has a compiled form for each kind of layer and mode; torch would fall "
        "back to eager after 8",
        gain="correctness of compiled layers",
    ),
    Patch(
        file="compiler.py", target="dynamo.specialize_float", library="torch",
        reason="numbers of a layer, such as the scale of attention, are constants of its form",
        gain="correctness of compiled layers",
    ),
)  # fmt: skip


def patched(path: Path) -> Iterator[str]:
    """Yield the attributes and items of imported libraries that a file replaces or sets."""
    tree = ast.parse(path.read_text())
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {(each.asname or each.name).split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("rlhf"):
            foreign |= {each.asname or each.name for each in node.names}
    libraries = foreign - {*OF_THE_PROCESS}
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(alias)], ast.Attribute() as value) if (
                root(value) in libraries
            ):
                libraries.add(alias)
            case ast.Assign([ast.Name(alias)], value) | ast.AnnAssign(
                ast.Name(alias), _, value
            ) if value is not None and is_imported(value):
                libraries.add(alias)
            case ast.Assign([ast.Name(alias)], ast.Call(ast.Name("vars"), [value])):
                libraries |= {alias} if root(value) in foreign else set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets):
                changed = (ast.Attribute, ast.Subscript)
                yield from (
                    ast.unparse(each)
                    for each in targets
                    if isinstance(each, changed) and root(each) in libraries
                )
            case ast.Call(ast.Name("setattr"), [owner, *_]) if root(owner) in libraries:
                yield f"{ast.unparse(owner)}.*"


def is_imported(value: ast.AST) -> bool:
    """Return whether a value is `import_module("...")` of a library, or an attribute of it."""
    while isinstance(value, ast.Attribute):
        value = value.value
    match value:
        case ast.Call(ast.Name("import_module"), [ast.Constant(name)]):
            return not str(name).startswith("rlhf")
    return False


def root(node: ast.AST) -> str:
    """Return the name at the beginning of `name.attribute[item]`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_every_patch_of_a_library_is_in_the_table_and_no_other() -> None:
    found = {(path.name, target) for path in FILES for target in patched(path)}
    listed = {(each.file, each.target) for each in PATCHES}
    # A name that is set by `setattr` is a variable.
    listed = {
        (file, "core_model_loading.*") if "core_model_loading" in target else (file, target)
        for file, target in listed
    }
    assert found == listed


@pytest.mark.parametrize(
    "line",
    [
        "torch.x = 1",
        "from torch import nn\nnn.x.y = 1",
        "code: Any = import_module('fla.ops')\ncode.x = 1",
        "kind = import_module('fla.ops').Kind\nkind.x = 1",
    ],
)
def test_a_patch_that_is_not_listed_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(f"import torch\n{line}\n")
    assert [*patched(tmp_path / "file.py")] == [line.rpartition("\n")[2].removesuffix(" = 1")]
