"""Hosts that differ in what their ranks read, install or are told: one line names the first
difference. Each rank here has a folder of its own, as on another host."""

import json
import math
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers import AutoModelForCausalLM

import sft_runs
from rlhf.engine import Mesh
from rlhf.request.reader import read_config
from rlhf.train import agreement
from rlhf.train.agreement import fingerprint
from rlhf.train.dataset import prepare_data
from rlhf_devkit import Ranks, tiny
from sft_runs import Inputs

COPY = "copy one of the two to all hosts, or use a folder that all hosts share"
HOST = socket.gethostname()


def edit_weights(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    name = next(name for name in sorted(weights) if "1.mlp" in name or "lora_B" in name)
    weights[name][-1, -1] += 2**-20
    save_file(weights, file, metadata={"format": "pt"})


def edit_json(name: str, **values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))

    return edit


def edit_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + "{# another one #}")


def edit_rows(file: Path) -> None:
    file.write_text(file.read_text().replace("The answer is", "The result is", 1))


def two_hosts(inputs: Inputs, folder: Path) -> list[Path]:
    """Copy model and rows into one folder for each rank."""
    hosts = [folder / "first", folder / "second"]
    for host in hosts:
        shutil.copytree(inputs.model, host / "model")
        shutil.copytree(inputs.model, host / "teacher")
        shutil.copyfile(inputs.train, host / "train.jsonl")
        shutil.copyfile(inputs.eval, host / "eval.jsonl")
    return hosts


def run_in(hosts: list[Path], trainer: str, words: list[str], cache: str) -> None:
    """Start a run on this rank in its host's folder."""
    before = Path.cwd()
    os.chdir(hosts[distributed.get_rank()])
    try:
        tiny.run(trainer, words, cache)
    finally:
        os.chdir(before)


DIFFERENCES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "weights": (
        "model",
        edit_weights,
        "another model.layers.1.mlp.down_proj.weight than {first}, in policy model",
    ),
    "config": (
        "model",
        edit_json("config.json", rms_norm_eps=1e-5),
        "rms_norm_eps 1.0e-05, but {first} has 1.0e-06, in the config.json of policy model",
    ),
    "template": ("model", edit_template, "another chat template than {first}, in model"),
    "tokenizer": (
        "model",
        edit_json("tokenizer_config.json", bos_token="<|end|>"),
        "another tokenizer than {first}, in model",
    ),
    "rows": ("train.jsonl", edit_rows, "another data.train than {first}"),
    "held-out rows": ("eval.jsonl", edit_rows, "another data.eval than {first}"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_hosts_with_different_copies_are_named(
    case: str, two: Ranks, inputs: Inputs, tmp_path: Path
) -> None:
    name, edit, problem = DIFFERENCES[case]
    hosts = two_hosts(inputs, tmp_path)
    edit(hosts[1] / name)
    here = Inputs(Path("model"), Path("train.jsonl"), Path("eval.jsonl"), inputs.cache)
    words = sft_runs.words(here, tmp_path / "run", "--train.steps", "1", "--deepspeed.stage", "2")
    found = two.errors(run_in, hosts, "sft", words, str(inputs.cache))
    first = f"rank 0 on host {HOST}"
    assert found == 2 * [f"rank 1 on host {HOST} has {problem.format(first=first)}; {COPY}"]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_teacher_and_an_adapter_are_compared_too(
    two: Ranks, inputs: Inputs, tmp_path: Path
) -> None:
    hosts = two_hosts(inputs, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(inputs.model)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        hosts[0] / "adapter"
    )
    shutil.copytree(hosts[0] / "adapter", hosts[1] / "adapter")
    edit_weights(hosts[1] / "teacher")
    edit_weights(hosts[1] / "adapter")
    here = Inputs(Path("model"), Path("train.jsonl"), Path("eval.jsonl"), inputs.cache)
    words = sft_runs.words(here, tmp_path / "run", "--train.steps", "1", "--deepspeed.stage", "2")
    for trainer, more, name, where in (
        (
            "kd",
            ("--kd.teacher", "teacher"),
            "model.layers.1.mlp.down_proj.weight",
            "teacher teacher",
        ),
        (
            "sft",
            ("--model.adapter", "adapter"),
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight",
            "policy model with the adapter adapter",
        ),
    ):
        found = two.errors(run_in, hosts, trainer, [*words, *more], str(inputs.cache))
        role = "teacher: " if trainer == "kd" else ""
        assert found == 2 * [
            f"{role}rank 1 on host {HOST} has another {name} than rank 0 on host {HOST}, in "
            f"{where}; {COPY}"
        ]


def start(case: str, words: list[str], cache: str) -> None:
    """Compare the ranks at their start, of which rank 1 has something else."""
    os.environ["RLHF_CACHE"] = cache
    rank = distributed.get_rank()
    differs = rank == 1
    more = ["--optim.lr", "2e-2"] if differs and case == "settings" else []
    request = read_config("sft", overrides=[*words, *more])
    data = prepare_data(request)
    with pytest.MonkeyPatch.context() as patch:
        if differs and case == "versions":
            version, other = agreement.version_of, {"torch": "2.12.0"}
            patch.setattr(agreement, "version_of", lambda name: other.get(name) or version(name))
        if differs and case == "sources":
            own = agreement.module_digest
            patch.setattr(agreement, "module_digest", lambda name: own(name) + "edited")
        agreement.check_start(request, data, Mesh(rank=rank, world=2))


def test_versions_source_code_and_settings_are_compared(
    two: Ranks, inputs: Inputs, tmp_path: Path
) -> None:
    first, second = (f"rank {rank} on host {HOST}" for rank in range(2))
    expected = {
        "versions": f"{second} has torch 2.12.0, but {first} has {torch.__version__}; install the "
        "same on all hosts",
        "sources": f"{second} has another source code of rlhf than {first}; install the same on "
        "all hosts",
        "settings": f"{second} has optim.lr 0.02, but {first} has 0.01; start all ranks with the "
        "same settings",
    }
    words = sft_runs.words(inputs, tmp_path / "run")
    for case, message in expected.items():
        assert two.errors(start, case, words, str(inputs.cache)) == 2 * [message]


def start_elsewhere(inputs: list[Inputs], words: list[str]) -> None:
    """Compare ranks whose copies are in different places, one of which tokenises with more
    processes and writes to another folder."""
    rank = distributed.get_rank()
    own, output = inputs[rank], Path(f"runs/{rank}")
    os.environ["RLHF_CACHE"] = str(own.cache)
    more = ["--data.processes", str(rank + 1), *words]
    request = read_config("sft", overrides=sft_runs.words(own, output, *more))
    agreement.check_start(request, prepare_data(request), Mesh(rank=rank, world=2))


def test_hosts_may_have_their_copies_in_different_places(
    two: Ranks, inputs: Inputs, tmp_path: Path
) -> None:
    other = Inputs(*(tmp_path / name for name in ("model", "train.jsonl", "eval.jsonl", "cache")))
    shutil.copytree(inputs.model, other.model)
    shutil.copyfile(inputs.train, other.train)
    shutil.copyfile(inputs.eval, other.eval)
    two.run(start_elsewhere, [inputs, other], [])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (16, 8), (5, 7, 3)])
def test_a_change_of_any_element_changes_the_fingerprint(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "WORDS_ON_CPU", 4)
    value = (torch.arange(math.prod(shape)) % 2).reshape(shape).to(dtype)
    before, seen = fingerprint(value), set()
    for place in range(value.numel()):
        changed = value.clone()
        flat = changed.view(-1)
        flat[place] = 1 - flat[place] if dtype != torch.bool else ~flat[place]
        seen.add(fingerprint(changed))
    assert before not in seen
    assert len(seen) == value.numel()
    # It does not depend on where the tensor is in memory.
    longer = torch.cat([value.new_zeros(3), value.view(-1)])
    assert fingerprint(longer[3:].view(shape)) == before


def test_elements_that_change_places_change_the_fingerprint() -> None:
    value = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    swapped = value.clone()
    swapped[[3, 9]] = value[[9, 3]]
    numbers = {fingerprint(each) for each in (value, swapped, value.T, value.flip(1), -value)}
    assert len(numbers) == 5
