"""Which node of which job: from the variables of a step, not of a shell around a job."""

import os
from pathlib import Path

import pytest

from rollcall.launch.node import identity
from rollcall.launch.node.rendezvous import Meeting, RendezvousError
from rollcall.records.attempt import Rendezvous
from rollcall.records.run_dir import RunDir

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[08-09]",
    "SLURM_GPUS_ON_NODE": "4",
}


def test_a_task_of_a_step_is_its_node() -> None:
    found = identity.find(STEP)
    assert (found.number, found.host, found.peer, found.default_ranks) == (1, "n09", "n08", 4)


def test_every_start_has_its_own_key() -> None:
    again, step = STEP | {"SLURM_RESTART_COUNT": "1"}, STEP | {"SLURM_STEP_ID": "1"}
    assert len({identity.find(env).key for env in (STEP, again, step)}) == 3


def test_a_task_of_an_array_is_a_job_of_its_own() -> None:
    task = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    found = identity.find(STEP | task)
    assert (found.job, found.key) == ("17_3", "17_3.0.0")
    submitted_by_a_task = task | {"SLURM_ARRAY_JOB_ID": "5"}
    assert identity.find(STEP | submitted_by_a_task).job == "17"


def test_a_shell_inside_an_allocation_is_no_task() -> None:
    shell = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}
    found = identity.find(shell | {"CUDA_VISIBLE_DEVICES": ""})
    assert (found.count, found.default_ranks, found.peer) == (1, 2, None)


def test_several_tasks_per_node_are_refused() -> None:
    with pytest.raises(identity.NodeError, match="8 tasks on 2 nodes, but one per node is needed"):
        identity.find(STEP | {"SLURM_STEP_NUM_TASKS": "8"})


def test_half_a_step_is_refused() -> None:
    with pytest.raises(identity.NodeError, match="incomplete: 'SLURM_JOB_ID'"):
        identity.find({name: value for name, value in STEP.items() if name != "SLURM_JOB_ID"})


def test_simulated_nodes_share_the_gpus_of_the_machine() -> None:
    local = {"SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_JOB_ID": str(os.getpid())}
    local["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
    found = [identity.find(local | {"SUBMITIT_LOCAL_GLOBALID": number}) for number in "01"]
    assert [one.gpus for one in found] == ["0,1", "2,3"]
    assert [one.default_ranks for one in found] == [2, 2]
    assert found[0].key == found[1].key


def test_nodes_with_different_numbers_of_ranks_are_told_apart(tmp_path: Path) -> None:
    meeting = Meeting(RunDir(tmp_path, "a"), identity.find(STEP))
    Rendezvous(0, "n08", "10.0.0.1", 20000, 8).write(meeting.run.path, key=meeting.key)
    with pytest.raises(
        RendezvousError, match=r"would run 4 ranks, but node 0 \(n08\) runs 8: give"
    ):
        meeting.read((4, 4))
    assert meeting.read((8, 4)) is not None, "said for each node"
