"""Weights, masters and moments in files: the same bits as in memory, nothing left, and refusals."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from attrs import evolve
from plans import SHAPE, half, plan

from rlhf.engine import GIB, Mesh
from rlhf.errors import RLHFError
from rlhf_devkit.problem import (
    Case,
    configure,
    follow,
    load,
    losses,
    make_batch,
    start,
    whole_weights,
)
from rlhf_plugin_deepspeed import nvme
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, check
from rlhf_plugin_deepspeed.layouts import layouts
from rlhf_plugin_deepspeed.memory import estimate, states
from rlhf_plugin_deepspeed.nvme import Drive, StateFiles, file_system, find_drive, is_in_file
from rlhf_plugin_deepspeed.weights import BackendSharding

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
    options = {"frozen": FROZEN, "micro_batches": 2, "steps": 6} | options
    return Case(config=config, **options)


def mapped(folder):
    """The bytes of this process that are mappings of deleted files in the folder."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if f"{folder}/" in line]
    return [range(int(first, 16), int(last, 16)) for first, last in ends]


def count(tensors, folder):
    """How many of the tensors lie in files of the folder, and how many elsewhere."""
    places = mapped(folder)
    inside = [any(item.data_ptr() in place for place in places) for item in tensors if item.numel()]
    return sum(inside), len(inside) - sum(inside)


def shards(module):
    return [item for each in module.parameters() for item in BackendSharding().shards(each)]


@contextmanager
def disk_measured_quickly():
    """In this block the disk's speed is measured by the first blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.folder.disk.SPEED_SECONDS", 0.0)
        yield


def run(case, folder=None):
    """The curve, the final weights, and how many states lie in files of the folder and how many
    elsewhere, on whichever rank this is."""
    backend = DeepSpeedBackend()
    with disk_measured_quickly():
        outcome, engine, mesh = follow(backend, case)
    weights = whole_weights(DeepSpeedBackend(), engine)
    state = backend.save_checkpoint(engine).fragments
    moments = [item.values for item in state if item.kind.startswith("exp_avg")]
    trained = {item.name for item in state if item.kind.startswith("exp_avg")}
    masters = [item.values for item in state if item.kind == "weight" and item.name in trained]
    on_host = shards(engine.module) if case.config.backend_section.offload_param else []
    counted = count(masters + moments + on_host, folder)
    left = [] if folder is None else list(folder.iterdir())
    backend.close_mesh(mesh)
    curve = (outcome.losses, outcome.norms, outcome.moved)
    return curve, weights, counted, left, outcome.summary


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


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.matrix), "bf16"])
def test_an_adapter_trains_over_a_base_in_files(pair, disk, dtype):
    settings = {"stage": 3, "offload_param": True, "persistence_threshold": 40}
    options = {"dtype": dtype, "adapter": True, "frozen": (), "tied": False}
    in_memory = pair.run(run, case(settings, **options))
    in_files = pair.run(run, case(settings, disk, **options), disk)
    for plain, files in zip(in_memory, in_files, strict=True):
        assert same(plain, files)
        assert files[2][0] > plain[2][0] == 0
        assert files[2][1] == 0


def run_frozen(case, folder):
    """What a frozen model in shards on the CPU computes: at first, with weights that stay whole,
    and after its weights changed and were moved. And its shards, in files and elsewhere."""
    backend = DeepSpeedBackend()
    with disk_measured_quickly():
        mesh, engine, _ = start(backend, case)
    plan, module = load(backend, case, mesh, "reference", trained=False)
    frozen = backend.prepare(
        model=module, optimizer=None, schedule=None, role="reference", plan=plan, mesh=mesh
    )
    counted = count(shards(module), folder)
    batch = make_batch(0, [0, 1], mesh.device)
    results = []
    engine.backward(engine(batch, losses)["loss"].sum(), last=True)
    engine.step().read()
    with torch.no_grad():
        results.append(frozen(batch, losses)["loss"].clone())
        with backend.generation_context(engine=frozen):
            results.append(frozen(batch, losses)["loss"].clone())
        names = {name: name for name, _ in frozen.module.named_parameters()}
        backend.mix_weights(engine=frozen, source=engine, share=0.5, names=names)
        backend.offload_states(engine=frozen, kinds=("weights",))
        backend.reload_states(engine=frozen, kinds=("weights",))
        results.append(frozen(batch, losses)["loss"].clone())
    backend.close_mesh(mesh)
    return results, counted, plan.summary


def test_a_frozen_model_in_files_computes_the_same(pair, disk):
    settings = {"stage": 2, "frozen": "offload", "persistence_threshold": 0}
    in_memory = pair.run(run_frozen, case(settings), None)
    in_files = pair.run(run_frozen, case(settings, disk), disk)
    for plain, files in zip(in_memory, in_files, strict=True):
        assert all(torch.equal(*pair) for pair in zip(plain[0], files[0], strict=True))
        assert not torch.equal(files[0][0], files[0][2])
        assert (plain[1][0], files[1][1]) == (0, 0)
        assert files[1][0] > 0
        assert ", parameters on NVMe (0.0" in files[2]
    assert list(disk.iterdir()) == []


def test_the_run_says_what_a_step_costs(single, disk):
    ((*_, summary),) = single.run(run, case({"stage": 2}, disk), disk)
    head, _, tail = summary.partition(" GiB of each rank in ")
    assert head.startswith("ZeRO 2, fp32, 1 rank, ")
    assert ", optimizer on NVMe (0.0" in head
    assert tail.startswith(f"{disk}, 0.0 s to write at ")
    assert tail.endswith(" GB/s if not kept in memory)")


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
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with StateFiles(str(tmp_path)):
        copy, zeros, half = source.clone(), torch.zeros_like(source), source.half()
        shard = torch.empty(7, dtype=torch.bfloat16)
        matrix, counts = source.view(50, 100).clone(), torch.empty(7, dtype=torch.long)
        pinned = torch.ops.aten._pin_memory(copy)
    inside, outside = (copy, zeros, half, shard), (matrix, counts, source)
    assert [is_in_file(item) for item in (*inside, *outside)] == [True] * 4 + [False] * 3
    assert count((*inside, *outside), tmp_path) == (4, 3)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert pinned.data_ptr() == copy.data_ptr()
    assert torch.equal(copy, source)
    assert torch.equal(half, source.half())
    assert not zeros.any()
    assert (shard.dtype, shard.any().item()) == (torch.bfloat16, False)


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
        "remove zero_optimization.offload_param.nvme_path (deepspeed.nvme_path decides it)"
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


def test_models_share_the_disk():
    backend, model = DeepSpeedBackend(), half(preset="zero2_offload", nvme_path="/nvme")
    backend._drive = Drive(folder=Path("/nvme"), free=30 * GIB, speed=2e9)
    mesh = Mesh(world=4, device=torch.device("cpu"), memory=80 * GIB)
    common = {"config": model, "mesh": mesh, "model_shape": SHAPE, "trained": True, "occupied": 0}
    assert "21.0 GiB of each rank" in backend.configure_zero(role="policy", **common).summary
    with pytest.raises(RLHFError, match=r"needs 42\.0 GiB \(policy 21\.0, critic 21\.0\)"):
        backend.configure_zero(role="critic", **(common | {"occupied": 9 * GIB}))


def test_a_model_that_is_released_or_was_only_rehearsed_takes_no_room():
    drive = Drive(folder=Path("/nvme"), free=30 * GIB, speed=2e9)
    drive.check("teacher", 20 * GIB, first=True)
    drive.check("policy", 25 * GIB, first=True)
    with pytest.raises(RLHFError, match=r"needs 31\.0 GiB \(policy 25\.0, reference 6\.0\)"):
        drive.check("reference", 6 * GIB)


def test_frozen_weights_need_room_on_the_disk_too():
    backend = DeepSpeedBackend()
    settings = {"preset": "zero3_offload", "nvme_path": "/nvme"}
    mesh = Mesh(world=4, device=torch.device("cpu"), memory=80 * GIB)
    common = {"mesh": mesh, "model_shape": SHAPE}

    def summary(role, frozen, *, trained):
        model = half(**settings, frozen=frozen)
        options = {"config": model, "role": role, "trained": trained}
        options["occupied"] = 0 if trained else 9 * GIB
        return backend.configure_zero(**options, **common).summary

    backend._drive = Drive(folder=Path("/nvme"), free=28 * GIB, speed=2e9)
    # 7 Gi weights over 4 ranks: 2 bytes of weights, 12 of states.
    policy = summary("policy", "offload", trained=True)
    assert "optimizer and parameters on NVMe (24.5 GiB of each rank in /nvme, " in policy
    assert "NVMe" not in summary("reference", 3, trained=False)
    reference = summary("reference", "offload", trained=False)
    assert "parameters on NVMe (3.5 GiB of each rank in /nvme, 1.9 s to write at" in reference
    backend._drive = Drive(folder=Path("/nvme"), free=27 * GIB, speed=2e9)
    summary("policy", "offload", trained=True)
    with pytest.raises(RLHFError) as error:
        summary("reference", "offload", trained=False)
    assert str(error.value) == (
        "deepspeed.nvme_path /nvme has 27.0 GiB free for each rank, but needs 28.0 GiB (policy "
        "24.5, reference 3.5); choose another folder, or add ranks"
    )


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
        " (2.0 GiB of each rank in /nvme, 1.1 s to write at 2.00 GB/s if not kept in memory)"
    )
    assert drive.check("reference", 0) == ""
    with pytest.raises(RLHFError) as error:
        drive.check("policy", 4 * GIB)
    assert str(error.value) == (
        "deepspeed.nvme_path /nvme has 3.0 GiB free for each rank, but needs 4.0 GiB (policy "
        "4.0); choose another folder, or add ranks"
    )


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
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


def planned(**settings):
    """DeepSpeed's settings and the estimate of a rank."""
    each = plan(4, 80 * GIB, **settings)
    parts = estimate(half(**settings), each, SHAPE, world=4, trained=True)
    return each.settings["zero_optimization"], parts


def test_the_estimate_moves_masters_and_moments_from_the_host_to_files():
    _, before = planned(preset="zero2_offload")
    zero, after = planned(preset="zero2_offload", nvme_path="/nvme")
    # 7 Gi weights over 4 ranks: gradients and room for copies in 6 bytes, states in 12.
    assert (before["host"], before["nvme"]) == (31.5 * GIB, 0)
    assert (after["host"], after["nvme"]) == (10.5 * GIB, 21 * GIB)
    assert zero["offload_optimizer"]["device"] == "cpu"


def test_the_estimate_moves_weights_from_the_host_to_files():
    _, before = planned(preset="zero3_offload")
    zero, after = planned(preset="zero3_offload", nvme_path="/nvme")
    # As above, with 2 bytes of weights; gradients are not copied through the host.
    assert (before["host"], before["nvme"]) == (31.5 * GIB, 0)
    assert (after["host"], after["nvme"]) == (7 * GIB, 24.5 * GIB)
    assert {name: after[name] for name in after if name not in ("host", "nvme")} == {
        name: before[name] for name in before if name not in ("host", "nvme")
    }
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False, "nvme_path": "/nvme"}


def test_layouts_with_files_have_the_optimizer_on_the_host():
    run = half(preset="zero2_offload", nvme_path="/nvme")
    mesh = Mesh(world=4, device=torch.device("cpu"), memory=80 * GIB)
    names = [layout.name for layout in layouts(run, mesh, SHAPE)]
    assert names == [
        "ZeRO 1, optimizer on NVMe",
        "ZeRO 2, optimizer on NVMe",
        "ZeRO 3, optimizer on NVMe",
        "ZeRO 3, optimizer and parameters on NVMe",
    ]
