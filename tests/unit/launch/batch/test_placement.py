"""Where a job's step can run: on what is left of its hosts, and on more when there are more."""

import argparse
import time
from pathlib import Path

import pytest

from rollcall.launch.batch import placement
from rollcall.launch.batch.placement import Expansion, Hosts, NoSpareError
from rollcall.launch.runs import resolve, restarts
from rollcall.launch.runs.resolve import StepFacts
from rollcall.records.attempt import AttemptEvent
from rollcall.records.job import JobRecord, submitted_script
from rollcall.records.run_dir import RunDir

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
    hosts = Hosts(JOB, 2, None)
    assert hosts.choose(["n1"]) == ["n1", "n2"], "its supervisor was lost, not the host"
    assert hosts.choose(["n1"], ["n1"]) == ["n2", "n3"], "it was lost twice"
    assert hosts.choose(["n2"]) == ["n1", "n3"]
    assert hosts.choose(["n1"], ["n1"]) == ["n1", "n3"], "there is no other"
    command(slurm, "srun", "exit 1")
    with pytest.raises(NoSpareError, match="cannot reach n1, n2"):
        hosts.choose(["n1"])
    in_groups = {"SLURM_HET_SIZE": "1", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-3]", **JOB}
    with pytest.raises(NoSpareError, match="n1: groups of nodes start again together"):
        Hosts(in_groups, 3, None).choose(["n1"])


@pytest.mark.usefixtures("slurm")
def test_an_elastic_step_goes_on_with_what_is_left() -> None:
    step = ["srun", "--nodes=3", "--ntasks=3", *SRUN[4:]]
    hosts = Hosts(JOB, 3, (2, 4))
    assert (hosts.may_change, hosts.lacking) == (True, 1)
    left = hosts.choose(["n2"])
    assert (left, hosts.lacking) == (["n1", "n3"], 2)
    words = placement.on(step, SRUN[4:], left)
    assert {"--nodelist=n1,n3", "--nodes=2", "--ntasks=2"} < set(words)
    assert words[-3:] == SRUN[4:], "the program's own words stay"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "HOSTS_POLL", 0.3)
    monkeypatch.setattr(placement, "FREE", 0.3)


def is_due(expansion: Expansion, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not (due := expansion.is_due()) and time.monotonic() < end:
        time.sleep(0.01)
    return due


@pytest.mark.usefixtures("quick")
def test_a_lost_host_is_taken_back_when_it_answers(slurm: Path, tmp_path: Path) -> None:
    hosts = Hosts(JOB, None, (1, 3))
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    assert hosts.choose(["n2"]) == ["n1", "n3"]
    expansion = Expansion(run, "7", hosts)
    assert not is_due(expansion, 0.8)
    command(slurm, "srun", "exit 0")
    assert is_due(expansion)
    expansion.take_back()
    assert hosts.choose() == ["n1", "n2", "n3"]
    for _ in range(2):
        restarts.note(run, "7", "lost node", ["n2"])
    hosts.dead = {"n2"}
    assert not is_due(expansion, 0.8), "it was lost twice"


@pytest.mark.usefixtures("quick")
def test_a_job_is_queued_again_for_hosts_that_have_long_been_free(
    slurm: Path, tmp_path: Path
) -> None:
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    hosts = Hosts(JOB, None, (1, 5))
    script = submitted_script(run.job, "7")
    start = 'echo "sbatch: Job 8 to start at $(date +%FT%T) using 2 processors" >&2'
    command(slurm, "sbatch", f'echo "$*" >>{tmp_path}/asked; {start}')
    assert not is_due(Expansion(run, "7", hosts), 1.2), "without a script"
    script.write_text("#!/bin/bash\n#SBATCH --requeue\n")
    assert is_due(Expansion(run, "7", hosts))
    assert (tmp_path / "asked").read_text().splitlines()[0] == f"--test-only --nodes=2 {script}"
    command(slurm, "sbatch", start.replace("date", "date -d '1 hour'"))
    assert not is_due(Expansion(run, "7", hosts), 1.2), "they are taken"
    command(slurm, "sbatch", start)
    restarts.note(run, "7", "more hosts")
    AttemptEvent(0, "7", "started", 1.0, hosts=["n1", "n2", "n3"], ranks=3).append(run.path)
    assert not is_due(Expansion(run, "7", hosts), 1.2), "it was in vain the last time"


def facts(run: RunDir, *words: str, nodes: tuple[int, int] | None = None, **env: str) -> StepFacts:
    options = argparse.Namespace(run_dir=run.path, cells=None, nodes=nodes, command=list(words))
    return resolve.facts_of_batch(options, env, "7")


def test_a_batch_learns_from_the_record_of_the_job_what_its_step_needs(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    JobRecord("elsewhere", 2, spares=1).write(run.path)
    found = facts(run, "srun", "true")
    assert (found.run.path, found.is_named, found.nodes, found.span) == (run.path, True, 2, None)
    JobRecord("elsewhere", 4, min_nodes=2).write(run.path)
    found = facts(run, "srun", "true", SLURM_ARRAY_TASK_ID="3")
    assert (found.run.name, found.nodes, found.span) == ("task-3", None, (2, 4))


def test_a_batch_learns_from_the_record_what_its_step_starts(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    # A word of the user's for srun need not begin with a dash, and the program may look like srun.
    step = ("srun", "--wait=0", "--comment", "a b", "rollcall", "supervise", "--", "--nodes=2")
    more = {"command": list(step[4:])}
    for continues in (True, False):
        JobRecord("elsewhere", 1, False, continues=continues, more=more).write(run.path)
        found = facts(run, *step)
        assert (found.command, found.continues) == (step[4:], continues)
    JobRecord("elsewhere", 1, False).write(run.path)
    assert facts(run, "srun", "--wait=0", "rollcall", "x").command == ("rollcall", "x")
    assert placement.on(step, step[4:], ["n1"])[-4:] == list(step[4:])


def test_a_batch_without_a_record_reads_the_words_of_the_template(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "it")
    supervise = ["python", "-m", "launch", "supervise", "--run-dir", str(run.path), "--", "fit.py"]
    found = facts(run, *SRUN[:4], *supervise, nodes=(1, 2))
    assert (found.run.path, found.is_named, found.nodes, found.span) == (run.path, True, 2, (1, 2))
    with pytest.raises(resolve.CommandError, match="starts neither"):
        facts(run, *SRUN)


@pytest.mark.parametrize("words", [[], ["--lr", "1"], ["-m"], ["-m", "--help"]])
def test_a_supervisor_needs_a_program(words: list[str]) -> None:
    options = resolve.parser().parse_args(["--", *words])
    with pytest.raises(resolve.CommandError, match="no program: add -- -m train"):
        resolve.work_of_supervisor(options, {}, "7")


@pytest.mark.parametrize("is_training", [True, False, None])
def test_a_supervisor_learns_from_the_record_what_its_program_is(
    tmp_path: Path, is_training: bool | None
) -> None:
    (tmp_path / "job").mkdir()
    if is_training is not None:
        JobRecord("elsewhere", 1, is_training).write(tmp_path)
    options = resolve.parser().parse_args(["--run-dir", str(tmp_path), "--", "-m", "train", "gpt"])
    work = resolve.work_of_supervisor(options, {}, "7")
    assert work.program == ("-m", "train", "gpt")
    assert (work.is_training, work.is_submitted) == (
        is_training is not False,
        is_training is not None,
    )
