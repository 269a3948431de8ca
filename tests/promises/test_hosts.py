"""A run over two hosts: the same command on each, in network namespaces where that is allowed."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import sft_runs
from rlhf_devkit import Ranks, column
from sft_runs import Inputs

ADDRESSES = ("10.98.7.1", "10.98.7.2")


def on_host(
    number: int, words: Sequence[str], *, address: str, port: int, before: Sequence[str] = (),
    **variables: str,
) -> subprocess.Popen[str]:  # fmt: skip
    """Start one host's share of a run, one rank."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PET_NNODES": "2"} | variables
    environment |= {"PET_NODE_RANK": str(number), "PET_MASTER_ADDR": address}
    environment |= {"PET_MASTER_PORT": str(port), "PET_NPROC_PER_NODE": "1"}
    return subprocess.Popen(
        [*before, sys.executable, "-m", "rlhf", "run", "sft", *words],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(processes: Sequence[subprocess.Popen[str]]) -> tuple[list[int], str]:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    return [process.returncode for process in processes], "\n".join(outputs)


@pytest.mark.matrix
def test_a_signal_on_one_host_stops_both_and_the_same_commands_continue(
    inputs: Inputs, tmp_path: Path, port: int
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "400", "--resume")
    words += ["--checkpoint.stop_signals", "[USR1]"]
    place = {"address": "127.0.0.1", "RLHF_CACHE": str(inputs.cache)}
    hosts = [on_host(number, words, port=port, **place) for number in range(2)]
    sft_runs.wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 2', *hosts)
    hosts[1].send_signal(signal.SIGUSR1)
    codes, output = finish(hosts)
    assert codes == [143, 143], output
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    last = int(saved.name.removeprefix("step-"))

    words += ["--train.stop_at", str(last + 2)]
    codes, output = finish([on_host(n, words, port=port, **place) for n in range(2)])
    assert codes == [0, 0], output
    steps = column(sft_runs.read_metrics(tmp_path / "run"), "step")
    assert steps == list(range(1, last + 3))


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces that are joined by a cable."""
    names = [f"rlhf{os.getpid()}{side}" for side in "ab"]
    cable = [f"v{os.getpid()}{side}" for side in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add {cable[0]} type veth peer name {cable[1]}"]
    for name, end, address in zip(names, cable, ADDRESSES, strict=True):
        commands += [
            f"ip link set {end} netns {name}",
            f"ip -n {name} address add {address}/24 dev {end}",
            f"ip -n {name} link set {end} up",
            f"ip -n {name} link set lo up",
        ]
    try:
        for command in commands:
            try:
                subprocess.run(shlex.split(command), check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces here: {error}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.matrix
def test_two_hosts_that_see_each_other_over_a_network_only(
    inputs: Inputs, tmp_path: Path, namespaces: list[str]
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "3", "--deepspeed.stage", "2")
    hosts = [
        on_host(
            number, words, address=ADDRESSES[0], port=29500, RLHF_CACHE=str(inputs.cache),
            GLOO_SOCKET_IFNAME=f"v{os.getpid()}{'ab'[number]}",
            before=["ip", "netns", "exec", name],
        )
        for number, name in enumerate(namespaces)
    ]  # fmt: skip
    codes, output = finish(hosts)
    assert codes == [0, 0], output
    single = tmp_path / "single"
    words = sft_runs.words(
        inputs, single, "--train.steps", "3", "--deepspeed.stage", "2", "--nproc", "2"
    )
    assert subprocess.run([sys.executable, "-m", "rlhf", "run", "sft", *words]).returncode == 0
    expected, losses = (
        column(sft_runs.read_metrics(path), "loss") for path in (single, tmp_path / "run")
    )
    assert losses == expected


def run_in(folders: Sequence[str], words: list[str], cache: str) -> None:
    """A run on this rank in a working directory of its own, as on another host."""
    before = Path.cwd()
    os.chdir(folders[torch.distributed.get_rank()])
    try:
        sft_runs.run(words, cache)
    finally:
        os.chdir(before)


def test_a_host_without_the_run_folder_is_named(two: Ranks, inputs: Inputs, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("first", "second")]
    for folder in folders:
        Path(folder).mkdir()
    words = sft_runs.words(inputs, Path("run"), "--train.steps", "1")
    errors = two.errors(run_in, folders, words, str(inputs.cache))
    assert errors == 2 * [
        f"run is not on host {socket.gethostname()}; choose an --output that is the same folder "
        "on all hosts"
    ]
