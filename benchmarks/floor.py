"""The floor of a training step: its operations and the bytes it moves, counted without a GPU.

    python benchmarks/floor.py --shape 1.5b --tokens 18432 --flops 786e12 --bandwidth 4.3e12

One packed micro-batch runs forward and backward on torch's meta device, every token predicted; each
operator's inputs and outputs are counted as if nothing were fused. Products could take the time of
their operations, everything else that of its bytes; attention and the optimizer are left out. What
lies between the sum and a measurement is launches, waiting and the rest of the system; what fusing
can gain is in the bytes.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from model_folder import DENSE, VOCABULARY
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config

from rlhf.data.example import Answer, Example
from rlhf.data.packing import pack
from rlhf.engine import Mesh
from rlhf.memory.rehearsal import META
from rlhf.model.role import ModelSpec
from rlhf.model.shape import empty_model
from rlhf.readouts import token_logprobs
from rlhf.request.reader import read_config

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
FREE = ("aten.empty", "aten.detach")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=DENSE, default="1.5b")
    parser.add_argument("--tokens", type=int, default=18_432)
    parser.add_argument("--flops", type=float, default=786e12, help="a second, measured")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second, measured")
    parser.add_argument("--most", type=int, default=15, help="operators to show")
    options = parser.parse_args()
    counted = count(options.shape, options.tokens)
    products = 1e3 * counted.operations / options.flops
    moved = {name: 1e3 * size / options.bandwidth for name, size in counted.bytes.items()}
    whole = products + sum(moved.values())
    print("| what | times | ms |\n|---|---|---|")
    print(f"| products, {counted.operations / 1e12:.0f} T operations | | {products:.1f} |")
    for name, time in sorted(moved.items(), key=lambda item: -item[1])[: options.most]:
        print(f"| {name} | {counted.times[name]} | {time:.1f} |")
    print(
        f"| all bytes, {sum(counted.bytes.values()) / 1e9:.0f} GB | | {sum(moved.values()):.1f} |"
    )
    print(f"\n{options.tokens / products * 1e3:,.0f} tokens/s by products only,")
    print(f"{options.tokens / whole * 1e3:,.0f} with every other operator unfused")


def count(shape: str, tokens: int) -> "Counted":
    """One micro-batch of the shape."""
    hidden, intermediate, layers, heads, kv_heads, tied = DENSE[shape]
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=intermediate,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            tie_word_embeddings=tied, architectures=["Qwen2ForCausalLM"],
        ).save_pretrained(folder)  # fmt: skip
        words = ["--model", str(Path(folder)), "--data", "none.jsonl"]
        spec = ModelSpec(config=read_config("sft", overrides=words).config)
        model = empty_model(spec, Mesh())
    batch = pack([Example([], [Answer([0] * tokens)])], [0]).to(META)
    with Counted() as counted:
        logprobs = model(batch, token_logprobs)["logprobs"]
        logprobs.sum().backward()
    return counted


class Counted(TorchDispatchMode):
    """Operations of products, and bytes that all other operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.bytes: Counter[str] = Counter()
        self.times: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = tensors((args, kwargs)), tensors(result)
        name = str(func).rsplit(".", 1)[0]
        if name in PRODUCTS:
            left, right = [tensor for tensor in given if tensor.dim() >= 2][-2:]
            self.operations += 2 * left.numel() * right.shape[-1]
        elif not name.startswith(FREE) and not is_view(name, given, made):
            unique = {id(tensor): tensor for tensor in (*given, *made)}.values()
            self.bytes[name] += sum(item.numel() * item.element_size() for item in unique)
            self.times[name] += 1
        return result


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def is_view(name: str, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an operator gives nothing but another look at what it was given."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    shares = all(tensor.untyped_storage()._cdata in known for tensor in made)
    return bool(made) and shares and not name.endswith("_")


if __name__ == "__main__":
    main()
