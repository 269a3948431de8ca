"""Only kernels that are CUDA's own name CUDA; everything else asks torch or DeepSpeed for the
accelerator."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE, PLUGIN = "core/src/rlhf", "plugins/deepspeed/src/rlhf_plugin_deepspeed"
KERNELS = "plugins/kernels/src/rlhf_kernels"
CUDA_ONLY = {
    "plugins/tools/src/rlhf_tools/plan.py": "the device of a plan for other hardware",
    f"{CORE}/devices.py": "where kernels in Triton run",
    f"{CORE}/launch/importing.py": "the driver and a context, opened early, and Triton's digest",
    f"{CORE}/model/trainable.py": "bitsandbytes",
    f"{KERNELS}/attention_triton.py": "kernels in Triton",
    f"{KERNELS}/cudnn.py": "attention by cuDNN",
    f"{KERNELS}/fp8.py": "products in FP8",
    f"{KERNELS}/fused.py": "a kernel in Triton",
    f"{KERNELS}/scans.py": "libraries in Triton",
    f"{PLUGIN}/diagnosis.py": "the versions of NCCL and of the CUDA toolkit",
    f"{PLUGIN}/mesh.py": "the allocator's setting, before torch knows the device",
}


def names_cuda(path: Path) -> bool:
    """Return whether a file uses `torch.cuda` or compares with the device type "cuda"."""
    return any(_of_cuda(ast.parse(path.read_text())))


def _of_cuda(tree: ast.AST) -> Iterator[bool]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("torch"), "cuda") | ast.Constant("cuda"):
                yield True
            case ast.ImportFrom("torch.cuda") | ast.alias("torch.cuda"):
                yield True


def test_only_code_that_is_specific_to_cuda_names_cuda() -> None:
    sources = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    found = {str(path.relative_to(ROOT)) for path in sources if names_cuda(path)}
    assert found == CUDA_ONLY.keys()


def test_the_check_sees_each_way_to_name_cuda(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    for source in ("torch.cuda.Stream()", 'x = kind == "cuda"', "import torch.cuda"):
        path.write_text(source)
        assert names_cuda(path)
    path.write_text('"""On cuda."""\ntorch.get_device_module(device).Stream()')
    assert not names_cuda(path)
