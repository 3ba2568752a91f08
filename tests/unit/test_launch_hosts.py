"""Where a job's step can run: on what is left of its hosts, and on more when there are more."""

import time
from pathlib import Path

import pytest

from launch import restarts, spares, widen
from launch.spares import Hosts, NoSpareError
from launch.widen import Widening
from train.run import RunDir, append_line

SRUN = ["srun", "--cpus-per-task=2", "--nodes=2", "--ntasks=2", "python", "fit.py", "--nodes=9"]
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of commands that stand for Slurm's: `srun` starts nothing on n2."""
    command(tmp_path, "srun", '[[ "$*" != *nodelist=n2* ]]')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


def command(place: Path, name: str, line: str) -> None:
    (place / name).write_text(f"#!/bin/bash\n{line}\n")
    (place / name).chmod(0o755)


def test_a_spare_takes_the_place_of_a_dead_host(slurm: Path) -> None:
    hosts = Hosts(SRUN, JOB, None)
    assert hosts.choose(["n1"]) == ["n1", "n2"], "its supervisor was lost, not the host"
    assert hosts.choose(["n1"], ["n1"]) == ["n2", "n3"], "it was lost twice"
    assert hosts.choose(["n2"]) == ["n1", "n3"]
    assert hosts.choose(["n1"], ["n1"]) == ["n1", "n3"], "there is no other"
    command(slurm, "srun", "exit 1")
    with pytest.raises(NoSpareError, match="cannot reach n1, n2"):
        hosts.choose(["n1"])


@pytest.mark.usefixtures("slurm")
def test_an_elastic_step_goes_on_with_what_is_left() -> None:
    step = ["srun", "--nodes=3", "--ntasks=3", *SRUN[4:]]
    hosts = Hosts(step, JOB, (2, 4))
    assert (hosts.may_change, hosts.lacking) == (True, 1)
    left = hosts.choose(["n2"])
    assert (left, hosts.lacking) == (["n1", "n3"], 2)
    words = spares.on(step, left)
    assert {"--nodelist=n1,n3", "--nodes=2", "--ntasks=2"} < set(words)
    assert words[-3:] == SRUN[4:], "the program's own words stay"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widen, "LOOK", 0.3)
    monkeypatch.setattr(widen, "FREE", 0.3)


def is_due(widening: Widening, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not (due := widening.is_due()) and time.monotonic() < end:
        time.sleep(0.01)
    return due


@pytest.mark.usefixtures("quick")
def test_a_lost_host_is_taken_back_when_it_answers(slurm: Path, tmp_path: Path) -> None:
    hosts = Hosts(["srun", "true"], JOB, (1, 3))
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    assert hosts.choose(["n2"]) == ["n1", "n3"]
    widening = Widening(run, "7", hosts)
    assert not is_due(widening, 0.8)
    command(slurm, "srun", "exit 0")
    assert is_due(widening)
    widening.take_back()
    assert hosts.choose() == ["n1", "n2", "n3"]
    for _ in range(2):
        restarts.note(run, "7", "lost node", ["n2"])
    hosts.dead = {"n2"}
    assert not is_due(widening, 0.8), "it was lost twice"


@pytest.mark.usefixtures("quick")
def test_a_job_is_queued_again_for_hosts_that_have_long_been_free(
    slurm: Path, tmp_path: Path
) -> None:
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    hosts = Hosts(["srun", "true"], JOB, (1, 5))
    script = run.job / "7_submission.sh"
    start = 'echo "sbatch: Job 8 to start at $(date +%FT%T) using 2 processors" >&2'
    command(slurm, "sbatch", f'echo "$*" >>{tmp_path}/asked; {start}')
    assert not is_due(Widening(run, "7", hosts), 1.2), "without a script"
    script.write_text("#!/bin/bash\n#SBATCH --requeue\n")
    assert is_due(Widening(run, "7", hosts))
    assert (tmp_path / "asked").read_text().splitlines()[0] == f"--test-only --nodes=2 {script}"
    command(slurm, "sbatch", start.replace("date", "date -d '1 hour'"))
    assert not is_due(Widening(run, "7", hosts), 1.2), "they are taken"
    command(slurm, "sbatch", start)
    restarts.note(run, "7", "more hosts")
    line = {"attempt": 0, "job": "7", "hosts": ["n1", "n2", "n3"], "ranks": 3, "time": 1.0}
    append_line(run.job / "attempts.jsonl", {**line, "event": "started"})
    assert not is_due(Widening(run, "7", hosts), 1.2), "it was in vain the last time"
