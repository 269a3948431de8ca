"""What the system adds to a step: the time of a run's own step over that of a bare loop of the same
forward, backward and AdamW.

    python benchmarks/overhead.py --stages 0 1 2 3

Both take the same packed micro-batches of the embedded demo in one process on the CPU, in fp32, in
turns; the bare loop is plain torch without metrics, checks, schedule or clipping. Seconds of this
process's CPU, median over the steps, and their ratio.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from rlhf.data.loader import batches_from
from rlhf.launch.places import Marker
from rlhf.model.architecture import read_architecture
from rlhf.model.load import load_whole
from rlhf.model.packed import PackedModel
from rlhf.readouts import token_logprobs
from rlhf.registry.gateway import load_hooks
from rlhf.request.reader import read_config
from rlhf.train.dataset import prepare_data
from rlhf.train.loop import Stepper
from rlhf.train.set_up import set_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--size", type=int, default=128, help="rows a step")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the numbers too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = [measure(stage, options) for stage in options.stages]
    print("| ZeRO | bare loop, ms | a run's step, ms | ratio |\n|---|---|---|---|")
    for found in results:
        stage, bare, step, ratio = found.values()
        print(f"| {stage} | {bare:.1f} | {step:.1f} | {ratio:.3f} |")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def measure(stage: int, options: argparse.Namespace) -> dict[str, float]:
    """Both, step by step in turns."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--model", "demo:base", "--data", "demo:arithmetic", "--model.dtype", "fp32",
            "--batch.size", str(options.size), "--batch.tokens", str(options.tokens),
            "--train.steps", str(options.steps), "--deepspeed.stage", str(stage),
            "--data.workers", "0", "--output", folder,
        ]  # fmt: skip
        if stage == 3:
            # Below the threshold DeepSpeed keeps weights gathered, and stage 3 would cost nothing.
            words += ["--deepspeed.persistence_threshold", "0"]
        request = read_config("sft", overrides=words)
        hooks, observers = load_hooks(request.config)
        mesh = hooks.setup_mesh(config=request.config)
        data = prepare_data(request)
        session = set_up(request, data, mesh, hooks, observers, Path(folder), None, Marker(None, 0))
        session.engine.train()
        bare, stepper = bare_step(request.config, session), Stepper(session)
        order, source = session.train_order, batches_from(session.train_order)
        times: dict[str, list[float]] = {"bare": [], "step": []}
        for number in range(options.steps):
            plan = order.step(number)
            batches = list(itertools.islice(source, plan.num_batches))
            times["bare"].append(timed(bare, batches, plan.totals["tokens"]))
            times["step"].append(timed(whole_step, session, stepper, plan, batches))
        hooks.close_mesh(mesh=mesh)
    medians = {name: 1e3 * statistics.median(values[4:]) for name, values in times.items()}
    ratios = [s / b for b, s in zip(times["bare"][4:], times["step"][4:], strict=True)]
    return {"stage": stage, **medians, "ratio": statistics.median(ratios)}


def whole_step(session: Any, stepper: Stepper, plan: Any, batches: Any) -> None:
    """Take one step as the loop does, and read its numbers as the journal does."""
    report = stepper.take(plan, batches).report
    assert report is not None
    report.read(session.trainer.derive)


def bare_step(config: Any, session: Any) -> Callable[[Any, float], None]:
    """The same model and optimizer without anything around them."""
    causal = load_whole(
        read_architecture(config), config, "causal", torch.float32, device=torch.device("cpu")
    )
    model = PackedModel(causal, path=session.engine.module.path).train()
    optimizer = AdamW(model.parameters(), lr=config.optim.lr, fused=True)

    def step(batches: Any, total: float) -> None:
        for batch in batches:
            logprobs = model(batch, token_logprobs)["logprobs"]
            (-logprobs.sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(act: Callable[..., None], *given: Any) -> float:
    start = time.process_time()
    act(*given)
    return time.process_time() - start


if __name__ == "__main__":
    main()
