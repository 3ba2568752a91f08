"""A job as sbatch reads it: recorded scripts, and values that a shell would take apart."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rollcall.launch.scheduler.job import Job, needs_slurm, render
from rollcall.messages.refusal import RefusedError

GOLDEN = Path(__file__).parent / "golden"
SMALL = Job(
    name="digits-1",
    nodes=1,
    command=("/venv/bin/python", "-m", "launch", "supervise", "--", "-m", "train", "digits"),
    directory="/runs/digits-1/code",
    output="/runs/digits-1/job/slurm-%j.out",
    cpus_per_task=2,
    batch=("/venv/bin/python", "-m", "launch", "batch"),
)
LARGE = replace(
    SMALL,
    nodes=16,
    cpus_per_task=32,
    gpus_per_node="8",
    mem="900G",
    time="1-12",
    partition="gpu",
    options={"account": "team a", "qos": "high"},
)
GROUPS = replace(
    LARGE, nodes=3, groups=(replace(LARGE, nodes=1), replace(SMALL, nodes=2, partition="old"))
)


@pytest.mark.parametrize(
    ("job", "golden"),
    [(SMALL, "small.sbatch"), (LARGE, "large.sbatch"), (GROUPS, "groups.sbatch")],
)
def test_script_is_the_recorded_one(job: Job, golden: str) -> None:
    assert render(job) == (GOLDEN / golden).read_text()


def test_hostile_values_reach_the_command_unchanged(tmp_path: Path) -> None:
    words = ["a b", "$(touch x)", "`touch x`", ";touch x", "it's", '"', "\\", "*", "!", "é"]
    (tmp_path / "a 'b").mkdir()
    # `echo` prints one word per line in the place of srun.
    (tmp_path / "srun").write_text('#!/bin/sh\nshift 3\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    script = render(
        replace(SMALL, command=tuple(words), directory=str(tmp_path / "a 'b"), batch=())
    )
    shown = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True, env={"PATH": f"{tmp_path}:/bin"}
    )
    assert shown.stdout.splitlines() == words
    assert list((tmp_path / "a 'b").iterdir()) == []


def test_directives_are_read_back_as_they_were_meant() -> None:
    script = render(replace(LARGE, options={"account": "it's $(id)"}, name="x"))
    words = [shlex.split(line[8:]) for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert ["--account=it's $(id)"] in words


def test_a_line_break_in_a_value_is_refused() -> None:
    with pytest.raises(RefusedError, match="control character"):
        render(replace(SMALL, options={"account": "a\n#SBATCH --nodes=99"}))


@pytest.mark.parametrize(("time", "lead"), [(None, 120), ("2:00:00", 120), ("4", 60), ("1:0", 15)])
def test_the_stop_signal_leaves_most_of_a_short_limit(time: str | None, lead: int) -> None:
    assert f"--signal=B:USR2@{lead}\n" in render(replace(SMALL, time=time))


def test_options_of_sbatch_stand_as_given_and_ours_give_way() -> None:
    given = {"exclusive": None, "no-requeue": None, "signal": "B:TERM@9", "mail-user": "me@here"}
    script = render(replace(SMALL, options=given, srun=("--label", "--mpi=none"), setup=("ml a",)))
    lines = script.splitlines()
    for option in ("exclusive", "no-requeue", "signal=B:TERM@9", "mail-user=me@here"):
        assert lines.count(f"#SBATCH --{option}") == 1
    assert "#SBATCH --mail-type=END,FAIL" in lines
    assert "#SBATCH --requeue" not in lines
    assert script.count("signal=") == 1
    assert lines.index("ml a") > lines.index("cd /runs/digits-1/code || exit")
    assert "--wait=0 --label --mpi=none \\\n" in script


def test_spare_hosts_belong_to_the_job_and_not_to_its_step() -> None:
    lines = render(replace(SMALL, nodes=2, spares=1)).splitlines()
    assert {"#SBATCH --nodes=3", "#SBATCH --no-kill"} <= set(lines)
    assert any("srun" in line and "--nodes=2 --ntasks=2" in line for line in lines)


def test_an_elastic_step_takes_as_many_hosts_as_the_job_was_given() -> None:
    script = render(replace(SMALL, nodes=4, min_nodes=2))
    assert {"#SBATCH --nodes=2-4", "#SBATCH --no-kill"} <= set(script.splitlines())
    assert "ntasks-per-node" not in script, "Slurm would give it 2, always"
    count = '"$SLURM_JOB_NUM_NODES"'
    assert f"--nodes={count} --ntasks={count} --no-kill" in script
    assert "launch batch --nodes=2-4 \\\n" in script


def test_what_a_run_without_slurm_does_not_get_is_named() -> None:
    assert needs_slurm(SMALL) == []
    assert needs_slurm(replace(SMALL, options={"array": "0-3", "gres": "gpu:1"})) == []
    more = {**LARGE.options, "image": "x"}
    asked = replace(LARGE, setup=("module load x",), options=more, srun=("--label",))
    assert needs_slurm(replace(asked, batch=("batch", "--teardown=ls"))) == [
        "the profile's modules, environment and setup",
        *("--account", "--image", "--mem", "--partition", "--qos", "--srun-arg", "--teardown"),
    ]
    assert needs_slurm(GROUPS) == ["--account", "--mem", "--partition", "--qos"]
