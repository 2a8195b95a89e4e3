"""Ranks that share a GPU: what is set for them and what is said. ``tests/gpu/test_ranks_gpu.py`` runs them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ladder_residual.distributed import shared_gpu
from ladder_residual.distributed import world as world_module
from ladder_residual.distributed.world import distributed
from tests.ranks import start_ranks

SET_FOR_A_RANK = (
    "NCCL_HOSTID",
    "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
)


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """No variable of this feature is set, and MPS is off."""
    for name in (*SET_FOR_A_RANK, shared_gpu.VARIABLE, shared_gpu.SM_PERCENTAGE):
        monkeypatch.delenv(name, raising=False)
    environ = dict(os.environ)
    monkeypatch.setattr(os, "environ", environ)
    environ["CUDA_MPS_PIPE_DIRECTORY"] = str(tmp_path)
    environ["PATH"] = str(tmp_path)
    return tmp_path


def start_mps(directory, process=None):
    (directory / "control").touch()
    (directory / "nvidia-cuda-mps-control.pid").write_text(f"{process or os.getpid()}\n")


@pytest.mark.parametrize(
    ("ranks", "gpus", "devices", "hosts"),
    [(2, 1, [0, 0], 2), (4, 2, [0, 1, 0, 1], 2), (3, 2, [0, 1, 0], 2), (8, 1, [0] * 8, 8)],
)
def test_ranks_on_one_gpu_look_to_nccl_like_ranks_of_several_hosts(bare, ranks, gpus, devices, hosts):
    found = []
    for rank in range(ranks):
        for name in SET_FOR_A_RANK:
            os.environ.pop(name, None)
        shared_gpu.prepare(rank, ranks, gpus, one_host=True)
        found.append((shared_gpu.gpu_of(rank, gpus), os.environ["NCCL_HOSTID"]))
        assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert [device for device, _ in found] == devices
    assert len(set(found)) == ranks  # never twice the same GPU of the same host
    assert len({host for _, host in found}) == hosts == shared_gpu.ranks_per_gpu(ranks, gpus)


def test_enough_gpus_and_what_the_user_has_set_are_left_alone(bare):
    shared_gpu.prepare(1, 2, 2, one_host=True)
    assert not set(SET_FOR_A_RANK) & set(os.environ)
    os.environ["NCCL_SOCKET_IFNAME"] = "eth0"
    shared_gpu.prepare(1, 2, 1, one_host=False)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_IB_DISABLE" not in os.environ  # several hosts


def test_with_mps_each_rank_gets_its_share_of_the_sms(bare):
    shared_gpu.prepare(0, 4, 1, one_host=True)
    assert shared_gpu.SM_PERCENTAGE not in os.environ  # without MPS nothing limits a process
    start_mps(bare)
    shared_gpu.prepare(0, 4, 1, one_host=True)
    assert shared_gpu.sharing(4) == {"ranks_per_gpu": 4, "mps": "on", "sm_percentage": 25}
    assert shared_gpu.describe(4) == "4 ranks share one GPU through MPS, each with 25 % of its SMs"


def test_without_mps_one_line_says_what_it_costs_and_how_to_start_it(bare):
    assert "this machine has no nvidia-cuda-mps-control" in shared_gpu.describe(2)
    control = bare / "nvidia-cuda-mps-control"
    control.touch()
    control.chmod(0o755)
    said = shared_gpu.describe(2)
    assert said.startswith("2 ranks share one GPU; without MPS their kernels take turns")
    assert "`nvidia-cuda-mps-control -d` starts it" in said
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    start_mps(bare, gone.pid)
    assert shared_gpu.mps_state() == "off"  # its file is there, it is not


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_mps_of_another_user_serves_nobody_else(bare):
    start_mps(bare)
    assert shared_gpu.mps_state() == "on"
    os.chown(bare / "control", 12345, -1)
    assert "MPS runs for another user" in shared_gpu.describe(2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to everything")
def test_mps_that_must_not_be_written_to_is_another_users(bare):
    start_mps(bare, 1)  # root's process, which only root may signal
    assert shared_gpu.mps_state() == "on"
    (bare / "control").chmod(0o444)
    assert "MPS runs for another user" in shared_gpu.describe(2)


@pytest.mark.parametrize(
    ("name", "value", "call"),
    [
        (shared_gpu.VARIABLE, "yes", shared_gpu.is_shared),
        (shared_gpu.SM_PERCENTAGE, "half", shared_gpu.sm_percentage),
        (shared_gpu.SM_PERCENTAGE, "0", shared_gpu.sm_percentage),
    ],
)
def test_bad_values_are_named(name, value, call):
    os.environ[name] = value
    with pytest.raises(ValueError, match=f"{name} is '{value}': set it to"):
        call()


def test_sharing_needs_a_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    shared_gpu.share_gpu()
    with pytest.raises(ValueError, match="--share-gpu needs a GPU"), distributed():
        pass
    with distributed("cpu") as world:  # asked for by name: nothing is shared
        assert world.where == "1 process, cpu"


def _fail(connection, rank, message):
    """Both ranks think that they share a GPU, and the block of one ends with an error of torch's."""
    world_module._share_gpus = lambda device: 2
    try:
        with distributed("cpu", timeout=20):
            if rank == 0:
                raise RuntimeError(message)
            time.sleep(60)
    except (ValueError, RuntimeError) as error:
        connection.send(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1",
            "ValueError: NCCL refuses ranks that share a GPU here",
        ),
        (
            "CUDA error: an illegal memory access",
            "RuntimeError: CUDA error: an illegal",
        ),  # the other rank is there: it is our own
    ],
)
def test_errors_of_ranks_that_share_a_gpu_are_told_apart(message, expected):
    pipes, processes = start_ranks(2, _fail, message)
    assert pipes[0].poll(60)
    assert pipes[0].recv().startswith(expected)
    for process in processes:
        process.kill()
        process.join()
