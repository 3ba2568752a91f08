from __future__ import annotations

import pytest
import torch

from rollcall.config import ConfigError
from rollcall.train.ranks.world import Place, find_place, pick_device

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM_STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_torchrun_wins_over_slurm() -> None:
    assert find_place({**SLURM_STEP, **TORCHRUN}) == Place("torchrun", 3, 1, 4, 2)


def test_slurm_counts_only_inside_a_step() -> None:
    place = find_place(SLURM_STEP)
    assert (place.launcher, place.rank, place.world_size) == ("srun", 4, 5)
    assert (place.local_world_size, place.nodes) == (1, ("n1", "n2", "n3"))
    batch_shell = {name: value for name, value in SLURM_STEP.items() if name != "SLURM_STEP_ID"}
    assert find_place(batch_shell) == Place("one process")


def test_open_mpi_and_nothing() -> None:
    assert find_place(OPEN_MPI).rank == 1
    assert find_place({}) == Place("one process")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "0"}, "has RANK but not LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (
            {**TORCHRUN, "RANK": "4"},
            "started rank 4 in a world of 4 ranks; expected a rank from 0 to 3",
        ),
        ({**TORCHRUN, "RANK": "one"}, "RANK: expected a whole number, got 'one'"),
        ({**TORCHRUN, "ROLLCALL_WORLD_SIZE": "8"}, "found a world of 4 ranks, but 8 were started"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_LOCAL_RANK is not set"),
    ],
)
def test_half_an_environment_is_refused(env: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        find_place(env)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


@pytest.mark.parametrize(
    ("count", "local_rank", "launcher", "env", "expected"),
    [
        (0, 1, "torchrun", {}, "cpu"),
        (4, 1, "torchrun", {}, "cuda:1"),
        # --gpus-per-task: every task sees one GPU, its own
        (1, 3, "srun", {"SLURM_GPUS_ON_NODE": "4"}, "cuda:0"),
    ],
)
def test_device(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    local_rank: int,
    launcher: str,
    env: dict[str, str],
    expected: str,
) -> None:
    gpus(monkeypatch, count)
    place = Place(launcher, local_rank, local_rank, 4, 4)
    assert str(pick_device("auto", place, env)) == expected


@pytest.mark.parametrize(
    ("count", "wanted", "env", "expected"),
    [
        (2, "auto", {}, "LOCAL_RANK 3 on .* has no GPU: 2 visible"),
        (1, "auto", {"SLURM_GPUS_ON_NODE": "1"}, "LOCAL_RANK 3 on .* has no GPU: 1 visible"),
        (0, "cuda", {}, "device=cuda asks for GPUs, .* sees none"),
        (0, "nccl", {}, "device=nccl: expected auto, cpu or cuda"),
        (0, "auto", {"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1 asks for GPUs"),
    ],
)
def test_missing_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, wanted: str, env: dict[str, str], expected: str
) -> None:
    gpus(monkeypatch, count)
    with pytest.raises(ConfigError, match=expected):
        pick_device(wanted, Place("srun", 3, 3, 4, 4), env)
