"""Tree attention by our kernel beside torch's flex attention and, where it is installed,
FlashAttention 4, over the same rows, on a CUDA device.

    python benchmarks/attention.py
    python benchmarks/attention.py --heads 14 --key-heads 2 --width 64
    python benchmarks/attention.py --rows 'pairs of'

Milliseconds of the device for one layer in bf16, medians: forward, and forward with backward. All
get the same inputs in turns; the errors are those of the outputs and gradients of our kernel and of
FlashAttention as shares of the norm of flex attention's, which gets its sparse mask ready made and
is compiled for each row's length.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from rlhf.kernels import Scoring, Tree, TreeMask, blank_batch
from rlhf_kernels.flash import flash_row
from rlhf_kernels.rows import has_flash, layout
from rlhf_kernels.tree import fused_tree, heads_of, is_uneven

Spans = tuple[tuple[int, tuple[int, ...]], ...]
ROUNDS = 20
WARM_UP = 3
WAIT = 10_000_000
"""Cycles of the device."""


def examples(mean: int, total: int, answers: int) -> Spans:
    """Prompts and answers of rows of `mean` tokens, of 0.3 to 1.7 times this, `total` together."""
    generator, found, size = torch.Generator().manual_seed(0), [], 0
    while size < total:
        length = int(mean * (0.3 + 1.4 * torch.rand(1, generator=generator).item()))
        found.append((length // 2, (length // (2 * answers),) * answers))
        size += length
    return tuple(found)


ROWS: dict[str, Spans] = {
    "answers of 136 tokens": examples(136, 17_000, 1),
    "pairs of 400": examples(400, 17_000, 2),
    "answers of 1,000": examples(1000, 16_000, 1),
    "answers of 2,000": examples(2000, 16_000, 1),
    "pairs of 3,000": examples(3000, 20_000, 2),
    "answers of 4,000": examples(4000, 20_000, 1),
    "pairs of 6,000": examples(6000, 24_000, 2),
    "pairs of 8,000": ((7000, (500, 500)),) * 3,
    "eight answers of 1,024": ((64, (1024,) * 8),) * 2,
    "eight answers of 2,000": ((1000, (2000,) * 8),),
    "sixteen answers of 1,000": ((100, (1000,) * 16),),
    "pairs of 16,000": ((14_000, (1000, 1000)),) * 2,
    "one of 32,768": ((0, (32_768,)),),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--rows", default="", metavar="TEXT", help="only rows with TEXT in the name"
    )
    options = parser.parse_args()
    if options.heads % options.key_heads:
        parser.error("--heads must be a multiple of --key-heads")
    rows = {name: spans for name, spans in ROWS.items() if options.rows in name}
    if not rows:
        parser.error(f"--rows {options.rows}: in no name; the rows are {', '.join(ROWS)}")
    if not torch.cuda.is_available():
        parser.error("the kernels need a CUDA device, and there is none")
    columns = "ours | flex | ours / flex |"
    if has_flash():
        columns += " FlashAttention | FlashAttention / ours |"
    print(f"| row | forward: {columns} with backward: {columns} errors |")
    print("|---" * (3 + 2 * columns.count("|")) + "|")
    for name, spans in rows.items():
        torch._dynamo.reset()
        print(f"| {name} | {line(spans, options)} |", flush=True)


def line(spans: Spans, options: argparse.Namespace) -> str:
    size = sum(prompt + sum(answers) for prompt, answers in spans)
    whole = -(-size // 128) * 128
    batch = blank_batch(torch.zeros(whole, dtype=torch.long), spans).to(torch.device("cuda"))
    mask = TreeMask(Tree(batch), None)
    query, key, value, weights = (
        torch.randn(1, whole, heads, options.width, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (options.heads, options.key_heads, options.key_heads, options.heads)
    )
    blocks = create_block_mask(
        lambda batch, head, query, key: mask.visible(query, key), None, None, whole, whole,
        _compile=True,
    )  # fmt: skip
    compiled = torch.compile(flex_attention)
    scoring = Scoring(0.0, None, None, None)
    split = is_uneven(spans, heads_of(query, key, value, scoring), query.device)
    ways: list[Callable[[], Tensor]] = [
        lambda: fused_tree(query, key, value, mask, scoring, split=split),
        lambda: compiled(query, key, value, block_mask=blocks, enable_gqa=True),
    ]
    if has_flash():
        parts, scale = layout(spans, whole, query.device), options.width**-0.5
        ways.append(lambda: flash_row(query, key, value, parts, scale))

    def both(way: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        output = way()
        return output, *torch.autograd.grad(output, (query, key, value), weights.detach())

    cells: list[str] = []
    for run in (lambda way: way(), both):
        ours, flex, *flash = (statistics.median(times) for times in in_turns(run, ways))
        cells += [f"{ours:.3f}", f"{flex:.3f}", f"{ours / flex:.2f}"]
        for other in flash:
            cells += [f"{other:.3f}", f"{other / ours:.2f}"]
    first, known, *others = (
        [part[:, :, :size].detach().float() for part in both(way)] for way in ways
    )
    errors = [
        max(float((a - b).norm() / b.norm()) for a, b in zip(result, known, strict=True))
        for result in (first, *others)
    ]
    return " | ".join([*cells, ", ".join(f"{error:.1e}" for error in errors)])


def in_turns(run: Callable[[Any], Any], ways: Sequence[Any]) -> list[list[float]]:
    """Milliseconds of each round of each way."""
    times: list[list[float]] = [[] for _ in ways]
    for number in range(WARM_UP + ROUNDS):
        for way, own in zip(ways, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # While the device waits, the host runs ahead: launches are not measured.
            torch.cuda._sleep(WAIT)
            start.record()
            run(way)
            end.record()
            torch.cuda.synchronize()
            if number >= WARM_UP:
                own.append(start.elapsed_time(end))
    return times


if __name__ == "__main__":
    main()
