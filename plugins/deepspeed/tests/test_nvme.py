"""Masters and moments in files: the same bits as in memory, nothing left behind, and refusals."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from attrs import evolve
from plans import SHAPE, half, plan

from rlhf.engine import GIB, Mesh
from rlhf.errors import RLHFError
from rlhf.testing.problem import Case, configure, follow
from rlhf_plugin_deepspeed import nvme
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, check
from rlhf_plugin_deepspeed.layouts import layouts
from rlhf_plugin_deepspeed.memory import estimate, states
from rlhf_plugin_deepspeed.nvme import Drive, StateFiles, file_system, find_drive
from rlhf_plugin_deepspeed.weights import gathered

STAGES = (
    {"stage": 1},
    {"stage": 2},
    # Norms and biases stay whole on every rank.
    {"stage": 3, "persistence_threshold": 40},
    {"stage": 3, "offload_param": True, "persistence_threshold": 0},
)
FROZEN = ("model.layers.0.up.weight", "model.layers.1.norm.bias")


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    if re.fullmatch(nvme.ELSEWHERE, file_system(tmp_path)):
        pytest.skip("temporary files are not on a local disk")
    return folder


def case(settings, folder=None, *, dtype="fp32", optimizer="adamw", **options):
    where = {} if folder is None else {"nvme_path": str(folder)}
    section = DeepSpeedConfig(**settings, offload_optimizer=True, **where)
    config = configure(section, dtype=dtype, optimizer=optimizer)
    return Case(config=config, frozen=FROZEN, micro_batches=2, steps=6, **options)


def mapped(folder):
    """The bytes of this process that are mappings of deleted files in the folder."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if f"{folder}/" in line]
    return [range(int(first, 16), int(last, 16)) for first, last in ends]


def run(case, folder=None):
    """The curve, the final weights, and how many states lie in files of the folder and how many
    elsewhere, on whichever rank this is."""
    backend = DeepSpeedBackend()
    outcome, engine, mesh = follow(backend, case)
    weights = {name: value.clone() for name, value in gathered(engine, trained_only=False)}
    state = backend.save_checkpoint(engine).fragments
    moments = [item.values for item in state if item.kind.startswith("exp_avg")]
    trained = {item.name for item in state if item.kind.startswith("exp_avg")}
    masters = [item.values for item in state if item.kind == "weight" and item.name in trained]
    places = mapped(folder)
    inside = [
        any(item.data_ptr() in place for place in places)
        for item in masters + moments
        if item.numel()
    ]
    left = [] if folder is None else list(folder.iterdir())
    backend.close_mesh(mesh)
    curve = (outcome.losses, outcome.norms, outcome.moved)
    return curve, weights, (sum(inside), len(inside) - sum(inside)), left, outcome.summary


def same(some, others):
    return some[0] == others[0] and all(
        torch.equal(value, others[1][name]) for name, value in some[1].items()
    )


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        ("fp32", "adamw"),
        ("bf16", "muon"),
        pytest.param("bf16", "adamw", marks=pytest.mark.matrix),
        pytest.param("fp32", "lion", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("settings", STAGES, ids=str)
def test_states_in_files_follow_the_same_curve_to_the_last_bit(
    pair, disk, settings, dtype, optimizer
):
    options = {"dtype": dtype, "optimizer": optimizer}
    in_memory = pair.run(run, case(settings, **options))
    in_files = pair.run(run, case(settings, disk, **options), disk)
    for plain, files in zip(in_memory, in_files, strict=True):
        assert same(plain, files)
        (inside, outside), left = files[2:4]
        assert (inside > 0, outside, left) == (True, 0, [])
        assert plain[2][0] == 0
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("settings", STAGES, ids=str)
@pytest.mark.parametrize("source", ["files", "memory"])
def test_a_run_continues_from_files_in_memory_and_from_memory_in_files(
    pair, disk, tmp_path, settings, source
):
    first, second = (disk, None) if source == "files" else (None, disk)
    straight = pair.run(run, case(settings, first, save=(2, tmp_path)), first)[0]
    later = pair.run(run, case(settings, second, load=tmp_path), second)[0]
    assert later[0][0] == straight[0][0][2:]
    assert all(torch.equal(value, later[1][name]) for name, value in straight[1].items())
    if second is not None:
        assert later[2][1] == 0


def test_the_run_says_what_a_step_costs(single, disk):
    ((*_, summary),) = single.run(run, case({"stage": 2}, disk), disk)
    head, _, tail = summary.partition(" GiB of each rank in ")
    assert head.startswith("ZeRO 2, fp32, 1 rank, ")
    assert ", optimizer on NVMe (0.0" in head
    assert tail.startswith(f"{disk}, which a rank writes at ")
    assert " GB/s: at least " in tail


@pytest.mark.matrix
def test_a_killed_run_leaves_no_file(disk, tmp_path):
    words = (
        *("--deepspeed", "zero2_offload", "--deepspeed.nvme_path", str(disk), "--nproc", "2"),
        *("--train.steps", "100000", "--output", str(tmp_path / "run")),
    )
    command = [sys.executable, "-m", "rlhf", "run", "sft", *words]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        while not (metrics.is_file() and metrics.read_text()):
            assert process.poll() is None
            time.sleep(0.2)
        assert list(disk.iterdir()) == []
        # The ranks, and loaders that they started.
        assert sum(maps(path, disk) for path in Path("/proc").glob("[0-9]*/maps")) >= 2
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert list(disk.iterdir()) == []


def maps(path, folder):
    try:
        return f"{folder}/" in path.read_text()
    except OSError:
        return False


def test_what_is_in_a_file_is_not_pinned_and_begins_with_zeros(tmp_path):
    source = torch.arange(5000.0)
    with StateFiles(str(tmp_path)) as files:
        copy, zeros, half = source.clone(), torch.zeros_like(source), source.half()
        matrix = source.view(50, 100).clone()
        pinned = torch.ops.aten._pin_memory(copy)
    assert [files.holds(item) for item in (copy, zeros, half, matrix, source)] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert pinned.data_ptr() == copy.data_ptr()
    assert torch.equal(copy, source)
    assert not zeros.any()
    assert files.folder == str(tmp_path)


def refusal(**settings):
    config = configure(DeepSpeedConfig(**settings), dtype="bf16")
    with pytest.raises(RLHFError) as error:
        check(config)
    return str(error.value)


def test_combinations_are_refused():
    assert refusal(preset="zero2", nvme_path="/nvme") == (
        "deepspeed.nvme_path needs deepspeed.offload_optimizer; set both, or remove it"
    )
    config = configure(DeepSpeedConfig(preset="zero2_offload", nvme_path="/nvme"), dtype="bf16")
    check(config)
    with pytest.raises(RLHFError) as error:
        check(evolve(config, checkpoint=evolve(config.checkpoint, async_=True)))
    assert str(error.value) == (
        "deepspeed.nvme_path cannot be combined with checkpoint.async; remove one of the two"
    )


def test_deepspeeds_own_keys_name_the_setting():
    offload = {"device": "nvme", "nvme_path": "/nvme"}
    with pytest.raises(ValueError, match="remove") as error:
        DeepSpeedConfig(config={"zero_optimization": {"offload_optimizer": offload}})
    assert str(error.value) == (
        "remove zero_optimization.offload_optimizer.device (deepspeed.offload_optimizer decides "
        "it); remove zero_optimization.offload_optimizer.nvme_path (deepspeed.nvme_path decides it)"
    )
    with pytest.raises(ValueError, match="remove") as error:
        DeepSpeedConfig(config={"zero_optimization": {"offload_param": offload}})
    assert str(error.value) == (
        "remove zero_optimization.offload_param.device (deepspeed.offload_param decides it); "
        "remove zero_optimization.offload_param.nvme_path (parameters cannot be on NVMe; "
        "deepspeed.offload_param moves them to the host)"
    )


def test_a_folder_in_memory_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(nvme, "file_system", lambda folder: "tmpfs")
    with pytest.raises(RLHFError) as error:
        find_drive(tmp_path, Mesh())
    assert str(error.value) == (
        f"deepspeed.nvme_path {tmp_path} is not on a local disk (tmpfs); choose a folder on one"
    )


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "9p"])
def test_a_folder_behind_a_network_is_refused(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(nvme, "file_system", lambda folder: kind)
    with pytest.raises(RLHFError, match=f"is not on a local disk \\({kind}\\)"):
        find_drive(tmp_path, Mesh())


def test_trained_models_share_the_disk():
    backend, model = DeepSpeedBackend(), half(preset="zero2_offload", nvme_path="/nvme")
    backend._drive = Drive(folder=Path("/nvme"), free=30 * GIB, speed=2e9)
    mesh = Mesh(world=4, device=torch.device("cpu"), memory=80 * GIB)
    common = {"config": model, "mesh": mesh, "model_shape": SHAPE, "trained": True, "occupied": 0}
    assert "21.0 GiB of each rank" in backend.configure_zero(role="policy", **common).summary
    with pytest.raises(RLHFError, match=r"masters and moments take 42\.0 GiB"):
        backend.configure_zero(role="critic", **common)


def test_the_file_system_is_that_of_the_nearest_mount():
    assert file_system(Path("/proc/self/nowhere")) == "proc"


def test_the_name_of_a_mount_may_have_a_space(tmp_path):
    table, disk = tmp_path / "mounts", tmp_path / "a disk"
    table.write_text(f"one / ext4 rw 0 0\ntwo {tmp_path}/a\\040disk nfs4 rw 0 0\n")
    assert [file_system(it, table) for it in (disk / "states", tmp_path)] == ["nfs4", "ext4"]


def test_a_folder_that_cannot_be_made_or_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(RLHFError) as error:
        find_drive(tmp_path / "file", Mesh())
    assert str(error.value) == (
        f"deepspeed.nvme_path {tmp_path / 'file'} cannot be used (File exists); choose another "
        "folder"
    )

    def write_speed(folder):
        raise RLHFError(
            f"cannot write to {folder} (Read-only file system); choose another location"
        )

    monkeypatch.setattr(nvme, "write_speed", write_speed)
    with pytest.raises(RLHFError) as error:
        find_drive(tmp_path, Mesh())
    assert str(error.value) == (
        f"deepspeed.nvme_path: cannot write to {tmp_path} (Read-only file system); choose another "
        "location"
    )


def test_states_without_room_are_refused():
    drive = Drive(folder=Path("/nvme"), free=3 * GIB, speed=2e9)
    assert drive.check("policy", 2 * GIB) == (
        " (2.0 GiB of each rank in /nvme, which a rank writes at 2.00 GB/s: at least 1.1 s of a "
        "step, and about as long to read them, unless they stay in memory)"
    )
    with pytest.raises(RLHFError) as error:
        drive.check("policy", 4 * GIB)
    assert str(error.value) == (
        "deepspeed.nvme_path /nvme has 3.0 GiB free for each rank, but its masters and moments "
        "take 4.0 GiB; choose another folder, or add ranks"
    )


def test_a_disk_that_fills_up_is_told(tmp_path, monkeypatch):
    with StateFiles(str(tmp_path / "gone")), pytest.raises(RLHFError) as error:
        torch.zeros(4).clone()
    assert str(error.value) == (
        f"cannot write to {tmp_path / 'gone'}: No such file or directory; free some space or "
        "choose another folder"
    )

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with StateFiles(str(tmp_path)), pytest.raises(RLHFError) as error:
        torch.zeros(4).clone()
    assert str(error.value) == (
        f"cannot write to {tmp_path}: No space left on device; free some space or choose another "
        "folder"
    )


def test_parameters_on_the_host_are_not_states_of_the_accelerator():
    zero = plan(4, 80 * GIB, preset="zero3_offload").settings["zero_optimization"]
    assert states(half(), SHAPE, zero, world=4, gathered=0)["weights"] == 0


def test_the_estimate_moves_masters_and_moments_from_the_host_to_files():
    settings = {"preset": "zero2_offload"}
    plain = plan(4, 80 * GIB, **settings)
    files = plan(4, 80 * GIB, **settings, nvme_path="/nvme")
    before, after = (
        estimate(half(**settings), each, SHAPE, world=4, trained=True) for each in (plain, files)
    )
    # 7 Gi weights over 4 ranks: gradients and room for copies in 6 bytes, states in 12.
    assert (before["host"], before["nvme"]) == (31.5 * GIB, 0)
    assert (after["host"], after["nvme"]) == (10.5 * GIB, 21 * GIB)
    assert files.settings["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_layouts_with_files_have_the_optimizer_on_the_host():
    run = half(preset="zero2_offload", nvme_path="/nvme")
    mesh = Mesh(world=4, device=torch.device("cpu"), memory=80 * GIB)
    names = [layout.name for layout in layouts(run, mesh, SHAPE)]
    assert names == [
        "ZeRO 1, optimizer on NVMe",
        "ZeRO 2, optimizer on NVMe",
        "ZeRO 3, optimizer on NVMe",
        "ZeRO 3, optimizer on NVMe, parameters on the CPU",
    ]
