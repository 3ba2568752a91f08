"""The frameworks' variables, the guess of a framework, and when a rank gets a signal."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollcall.launch import frameworks
from rollcall.launch.frameworks import mpi
from rollcall.launch.frameworks.framework import RankContext
from rollcall.launch.node.processes import START, SignalDelivery
from rollcall.launch.rank import surroundings

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
ADDRESSES = ["10.0.0.1:5", "10.0.0.1:6", "10.0.0.2:5", "10.0.0.2:6"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import flax.linen", "jax"),
        ("def f():\n    from tensorflow import keras", "tensorflow"),
        ("import torch\nfrom ray.train.torch import TorchTrainer", "ray"),
        ("import torch\nfrom ray import train", "ray"),
        ("import torch.distributed\nimport ray.data", "torch"),
        ("import torch\nimport jax", "torch"),
        ("import torch\nimport deepspeed", "deepspeed"),
        ("from mpi4py import MPI", "mpi"),
        ("from . import jax", "torch"),
        ("not python", "torch"),
    ],
)
def test_a_framework_is_guessed_from_imports(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(text)
    user = ("-m", "rollcall.launch.rank.user_program", str(tmp_path))
    assert frameworks.guess((*user, "package/__main__.py", "--x")) == name
    assert frameworks.guess((*user, "-m", "package")) == name
    assert frameworks.guess((*user, "-m", "missing")) == "torch"


def test_variables_of_a_rank() -> None:
    def no_store() -> frameworks.framework.KeyValueStore:
        raise AssertionError

    place = RankContext(TORCHRUN, no_store, lambda: ADDRESSES)
    jax = frameworks.TABLE["jax"].variables(place)
    assert (jax["JAX_COORDINATOR_ADDRESS"], jax["JAX_PROCESS_ID"]) == ("10.0.0.1:5", 3)
    config = json.loads(str(frameworks.TABLE["tensorflow"].variables(place)["TF_CONFIG"]))
    assert config == {"cluster": {"worker": ADDRESSES}, "task": {"type": "worker", "index": 3}}


def test_ranks_without_torch_exchange_through_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    def of_rank(rank: int, folder: Path = tmp_path) -> tuple[Sequence[str], str, str]:
        env = {**TORCHRUN, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        place = RankContext(env, lambda: surroundings.store(env, folder), list)
        pmi = mpi._Server(place, place.store())
        pmi.answer({"cmd": "put", "key": f"k/{rank}", "value": f"v{rank}"})
        pmi.answer({"cmd": "barrier_in"})
        found = pmi.answer({"cmd": "get", "key": f"k/{1 - rank}"})
        job, again = (pmi.answer({"cmd": "get_my_kvsname"}) for _ in range(2))
        assert job == again, "a library may ask more than once"
        return surroundings._addresses(env, folder), found.rpartition("=")[2], job

    with ThreadPoolExecutor() as threads:
        (first, of_first, job), (second, of_second, same) = threads.map(of_rank, range(2))
        (*_, other), _ = threads.map(of_rank, range(2), [tmp_path / "other"] * 2)
    assert first == second and len(set(first)) == 2
    assert job == same != other, "MPICH names memory after it, which two jobs must not share"
    assert (of_first, of_second) == ("v1", "v0")


def test_slurms_variables_describe_the_rank() -> None:
    of_supervisor = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    of_supervisor |= {"SLURM_CPUS_PER_TASK": "8", "SLURM_GTIDS": "1", "PMI_RANK": "1"}
    env = {**TORCHRUN, **of_supervisor, "SLURM_JOB_ID": "7", "SUBMITIT_EXECUTOR": "local"}
    surroundings.prepare(env, "torch", Path())
    changed = {name: text for name, text in env.items() if TORCHRUN.get(name) != text}
    assert changed == {
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), "4"),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), "2(x2)"),
        **{"SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
        **{"SLURM_NODEID": "1", "SLURM_TASK_PID": str(os.getpid()), "SLURM_CPUS_PER_TASK": "4"},
        **{"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"},
    }


def test_nodes_may_have_different_numbers_of_ranks() -> None:
    env = {**TORCHRUN, "SLURM_STEP_ID": "0", "WORLD_SIZE": "5"}
    surroundings.prepare(env, "torch", Path(), (1, 2, 2))
    assert (env["SLURM_TASKS_PER_NODE"], env["SLURM_NTASKS_PER_NODE"]) == ("1,2(x2)", "2")
    place = RankContext(env, lambda: surroundings.store(env, Path()), list, (1, 2, 2))
    assert mpi._Server(place, surroundings.Files(Path(), "1"))._get("PMI_process_mapping") == (
        "cmd=get_result rc=0 msg=success value=(vector,(0,1,1),(1,2,2))"
    )


def test_a_rank_without_a_handler_is_waited_for_only_at_its_start() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        term = SignalDelivery(15)
        term.deliver({rank.pid: START - 1})
        assert rank.poll() is None and not term.reached
        term.deliver({rank.pid: START + 1})
        assert rank.wait(20) == -15
