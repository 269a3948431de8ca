"""Tokens per second of the engine `embedded` of rlhf-rollouts, with and without graphs of the
device, and of transformers' `generate`.

    python benchmarks/generation.py --shape 1.5b --rows 256 --prompt 256 --new 512 --answers 8

Random weights in a shape of the Qwen2.5 family, bf16 (fp32 on a CPU), random prompts, no end token;
each way writes once before its time is taken. `--answers` is the number of answers to each prompt.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from model_folder import DENSE, VOCABULARY
from transformers import AutoModelForCausalLM, Qwen2Config

import rlhf_rollouts.embedded as embedded
from rlhf.engine import Mesh
from rlhf.model.packed import BareEngine, PackedModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=DENSE, default="1.5b")
    parser.add_argument("--rows", type=int, default=256, help="answers in all")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--answers", type=int, default=1, help="answers to each prompt")
    parser.add_argument("--budget", type=int, default=16_384, help="batch.tokens of the engine")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    engine = engine_of(options.shape, device)
    random = torch.Generator().manual_seed(0)
    distinct = torch.randint(
        3, 1000, (options.rows // options.answers, options.prompt), generator=random
    )
    prompts = distinct.repeat_interleave(options.answers, 0)
    print(f"{options.rows} answers of {options.prompt} + {options.new} tokens, {device}")
    for way in options.ways:
        write = WAYS[way](engine, prompts, options)
        started = time.perf_counter()
        write(0)
        first = time.perf_counter() - started
        peak = reset_peak(device)
        started = time.perf_counter()
        write(1)
        seconds = time.perf_counter() - started
        speed = prompts.shape[0] * options.new / seconds
        print(
            f"| {way} | {speed:,.0f} tokens/s | {seconds:.2f} s, the first time {first:.2f} s "
            f"| {peak():.1f} GiB |",
            flush=True,
        )


def engine_of(shape: str, device: torch.device) -> BareEngine:
    """Return a model with random weights as an engine."""
    hidden, intermediate, layers, heads, kv_heads, tied = DENSE[shape]
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=32_768, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    precision = "fp32" if device.type == "cpu" else "bf16"
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        causal = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return BareEngine(module=PackedModel(causal), device=device, precision=precision)


def by_generate(engine: BareEngine, prompts: Any, options: Any) -> Callable[[int], None]:
    """Write by transformers' `generate`, with one seed for all rows."""

    def write(seed: int) -> None:
        torch.manual_seed(seed)
        ids = prompts.to(engine.device)
        with torch.no_grad():
            engine.module.causal.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new,
                min_new_tokens=options.new, do_sample=True, temperature=options.temperature,
                top_k=0, pad_token_id=0,
            )  # fmt: skip

    return write


def by_engine(engine: BareEngine, prompts: Any, options: Any, *, graphs: bool) -> Any:
    """Write by the engine `embedded`, with a seed for each answer."""
    captures = embedded.captures
    writer: Any = embedded.Embedded(
        config=SimpleNamespace(batch=SimpleNamespace(budget=options.budget)),  # type: ignore[arg-type]
        tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=0),
        mesh=Mesh(device=engine.device),
        hooks=SimpleNamespace(generation_context=lambda engine: nullcontext()),  # type: ignore[arg-type]
    )
    rows = prompts.tolist()

    def write(seed: int) -> None:
        embedded.captures = captures if graphs else lambda device: False
        drawn = writer.sample(
            engine, rows, seeds=[seed * len(rows) + n for n in range(len(rows))],
            max_new_tokens=options.new, max_tokens=options.prompt + options.new, ends=[-1],
            temperature=options.temperature,
        )  # fmt: skip
        assert all(len(answer.tokens) == options.new for answer in drawn)
        while writer.notes:
            print(writer.notes.pop())

    return write


def reset_peak(device: torch.device) -> Callable[[], float]:
    """Return a function for the peak of the device's memory from now on, in GiB; 0 on a CPU."""
    if device.type == "cpu":
        return lambda: 0.0
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats()
    return lambda: module.max_memory_allocated() / 2**30


WAYS = {
    "generate": by_generate,
    "engine": lambda *given: by_engine(*given, graphs=False),
    "engine, graphs": lambda *given: by_engine(*given, graphs=True),
}

if __name__ == "__main__":
    main()
