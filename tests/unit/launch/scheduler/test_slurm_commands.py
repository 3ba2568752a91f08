"""What Slurm's commands say, from small executables in their place; times as Slurm reads them."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.launch.scheduler import cluster, slurm
from rollcall.launch.scheduler.job import Job
from rollcall.launch.submission import preflight

JOB = Job("run", 2, ("true",), "/", "/slurm-%j.out", cpus_per_task=4, partition="main")
SINFO = """main*|3|1-infinite|1:00:00|up|4|8000|(null)|UNLIMITED
main*|1|1-infinite|1:00:00|up|8|16000|gpu:a100:2(S:0-1),gpu:h100:2|UNLIMITED
big|64|1-16|infinite|up|128|512000|gpu:8|96
old|8|1-infinite|1:00:00|down|8|16000|(null)|UNLIMITED"""
Fake = Callable[[str, str], None]

TIMES = [
    ("2", 120),
    ("02:00", 120),
    ("2:00:00", 7200),
    ("1-12", 129600),
    ("1-0:30", 88200),
    ("1-0:0:5", 86405),
    ("UNLIMITED", float("inf")),
]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put an executable on PATH that runs the given shell lines."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    def write(name: str, body: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    write("sinfo", f"cat <<'END'\n{SINFO}\nEND")
    write("scontrol", "echo 'MaxArraySize            = 1001'")
    write("sbatch", "cat >/dev/null; echo 'sbatch: Job 7 to start at 2030-01-01T00:00:00 using 8 "
          "processors on nodes n[1-2] in partition main' >&2")  # fmt: skip
    return write


UNCONFIGURED = """for name in resolve_ctls_from_dns_srv fetch_config; do
    echo "$(basename $0): error: $name: res_nsearch error: Unknown host" >&2
done
echo "$(basename $0): fatal: Could not establish a configuration source" >&2
exit 1"""


def test_slurms_commands_without_a_cluster_are_no_slurm(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slurm.is_available()
    other = tmp_path / "other"
    other.mkdir()
    for name in ("sinfo", "sbatch", "squeue"):
        fake(f"other/{name}", UNCONFIGURED)
    monkeypatch.setenv("PATH", f"{other}:/bin:/usr/bin")
    assert not slurm.is_available()
    with pytest.raises(slurm.SlurmError, match=r"squeue does not answer: .* no cluster is config"):
        slurm.queue(["1"])
    words = [sys.executable, str(ROOT / "launch" / "submit.py"), "--nodes=2", "--dry-run"]
    shown = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "# on this machine, 2 times" in shown.stdout


@pytest.mark.usefixtures("fake")
def test_an_elastic_job_may_ask_for_more_nodes_than_there_are() -> None:
    elastic = replace(JOB, nodes=8, min_nodes=2)
    assert preflight.check(elastic, "").startswith("expected to start at")
    with pytest.raises(slurm.SlurmError, match="--nodes 5-8: a job in partition main can have 4"):
        preflight.check(replace(elastic, min_nodes=5), "")


@pytest.mark.parametrize(("text", "seconds"), TIMES)
def test_times(text: str, seconds: float) -> None:
    assert slurm.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "two", "1h", "1:2:3:4", "-5", "1-2-3"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid Slurm time limit"):
        slurm.seconds(text)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    "partition", ["main", "old", "old,big"]
)  # jobs may wait for one that is down
def test_a_job_that_fits_says_when_it_starts(partition: str) -> None:
    job = replace(JOB, partition=partition)
    assert preflight.check(job, "") == "expected to start at 2030-01-01T00:00:00 on n[1-2]"


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            replace(JOB, partition="mian"),
            "--partition mian: no such partition; this cluster has big, mai",
        ),
        (replace(JOB, partition="old", nodes=9), "a job in partition old can have 8 at most"),
        (replace(JOB, nodes=5), "--nodes 5: a job in partition main can have 4 at most"),
        (replace(JOB, nodes=17, partition="big"), "partition big can have 16 at most"),
        (replace(JOB, partition="big,mian"), "--partition mian: no such partition"),
        (
            replace(JOB, time="2:00:00", partition=None),
            "the limit of partition main is 1:00:00; partition big allows it",
        ),
        (
            replace(JOB, time="0"),
            "--time 0: the limit of partition main is 1:00:00; .* big allows it",
        ),
        (replace(JOB, nodes=6), "can have 4 at most; partition big allows it"),
        (replace(JOB, gpus_per_node="5"), "no node of partition main has more than 4 GPUs; part"),
        (
            replace(JOB, gpus_per_node="a100:9"),
            "--gpus-per-node a100:9: .* main has more than 4 GPUs$",
        ),
        (replace(JOB, mem="16G"), "--mem 16G: no node of partition main has more than 16000 MB"),
        (replace(JOB, cpus_per_task=9), "no node of partition main has more than 8 CPUs"),
        (
            replace(JOB, options={"array": "0-3,1001%2"}),
            r"--array 0-3,1001%2: the largest index on this cluster is 1000 \(MaxArraySize=1001\)",
        ),
    ],
)
def test_refusals_name_the_option_and_what_is_valid(job: Job, message: str) -> None:
    with pytest.raises(slurm.SlurmError, match=message):
        preflight.check(job, "")


def test_a_refusal_by_sbatch_is_told_without_its_prefixes(fake: Fake) -> None:
    fake("sbatch", "echo 'sbatch: error: Invalid account or account/partition' >&2; exit 1")
    with pytest.raises(slurm.SlurmError, match="refuses the job: Invalid account"):
        preflight.check(JOB, "")


def test_a_cluster_that_does_not_answer_is_an_error(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "RESTART", 0.5)
    fake("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(slurm.SlurmError, match="sinfo does not answer: Unable to contact"):
        preflight.check(JOB, "")


UNFIT = "echo 'allocation failure: Requested node configuration is not available' >&2"


def test_a_controller_that_restarts_is_asked_again(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At first it does not answer; then its nodes have not registered yet."""
    silent = "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2"
    begun, known = tmp_path / "begun", tmp_path / "known"
    table = f"cat <<'END'\n{SINFO}\nEND"
    states = f"case $* in *%T) printf '%s\n' 'n1|unknown' 'n2|idle'; touch {known}; exit;; esac"
    fake("sinfo", f"[ -e {begun} ] || {{ touch {begun}; {silent}; exit 1; }}\n{states}\n{table}")
    accepted = "echo 'sbatch: Job 7 to start at 2030-01-01T00:00:00 using 8 processors on n1' >&2"
    fake("sbatch", f"[ -e {known} ] && {{ {accepted}; exit; }}\n{UNFIT}; exit 1")
    assert preflight.check(JOB, "").startswith("expected to start at 2030")
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 2, notes
    assert "sinfo does not answer: Unable to contact slurm controller" in notes[0]
    assert "1 of 2 nodes of partition main have registered with it; asking again" in notes[1]


def test_a_job_that_no_node_fits_is_refused_at_once(fake: Fake) -> None:
    states = "case $* in *%T) printf '%s\n' 'n1|down*' 'n2|idle'; exit;; esac"
    fake("sinfo", f"{states}\ncat <<'END'\n{SINFO}\nEND")
    fake("sbatch", f"{UNFIT}; exit 1")
    with pytest.raises(slurm.SlurmError, match="can provide all of --cpus-per-task 4"):
        preflight.check(JOB, "")


def test_waiting_outlasts_a_controller_that_does_not_answer(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "fit.py").touch()
    fake("sbatch", "[ $1 = --test-only ] || echo Submitted batch job 7")
    fake("srun", "exit 1")
    ended = f"[ -e {tmp_path}/asked ] && echo '7|7|COMPLETED|None|N/A|1'"
    fake("squeue", f"{ended} && exit; touch {tmp_path}/asked; echo 'Socket timed out' >&2; exit 1")
    command = [sys.executable, f"{ROOT}/launch/submit.py", "--wait", "--name=a", "--", "fit.py"]
    waited = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert waited.returncode == 1
    assert waited.stderr == "rollcall: error: job 7 ended before the run ended\n"


def test_a_machine_with_sbatch_and_without_srun_gets_a_sentence(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fit.py").touch()
    fake("sbatch", "[ $1 = --test-only ] || echo Submitted batch job 7")
    (tmp_path / "others").mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name not in ("sbatch", "srun"):
            (tmp_path / "others" / program.name).symlink_to(program)
    monkeypatch.setenv("PATH", f"{tmp_path}:{tmp_path}/others")
    command = [sys.executable, f"{ROOT}/launch/submit.py", "--name=a", "--", "fit.py"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("rollcall: error: sbatch is on PATH, but srun is not; add ")
    assert refused.stderr.count("\n") == 1


def test_a_job_that_slurm_has_forgotten_has_no_state(fake: Fake) -> None:
    fake("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.state("7") is None


def test_a_task_of_an_array_that_slurm_has_forgotten_is_an_error(fake: Fake) -> None:
    fake("squeue", "exit 0")  # 22.05 says nothing
    with pytest.raises(slurm.SlurmError, match="does not know job 7_2"):
        slurm.status("7_2")


def test_what_happens_to_one_group_of_a_job_happens_to_the_job(fake: Fake) -> None:
    fake("squeue", "printf 'RUNNING|None|N/A|N/A\nPREEMPTED|None|N/A|2026-01-01T00:00:00\n'")
    assert slurm.status("7").is_preempted
    fake("squeue", "printf '7+0 n3\n7+1 n[1-2]\n'")
    assert "--het-group=0,1" in slurm.on_groups("7", ["n3", "n1", "n2"])
    assert {"--het-group=1", "--nodelist=n2"} <= {*slurm.on_groups("7", ["n2"])}


def test_the_partition_that_preempts_a_job_is_that_of_its_first_group(fake: Fake) -> None:
    parts = ("low PriorityTier=1", "high PriorityTier=2")
    lines = "\n".join(f"PartitionName={name} Nodes=n[1-2]" for name in parts)
    fake("scontrol", f"cat <<'END'\n{lines}\nEND")
    fake("squeue", "printf 'low\\nlow\\n'")
    assert cluster.preempting_partition("7") == "high"
    fake("squeue", "true")
    with pytest.raises(slurm.SlurmError, match="job 7 has no partition"):
        cluster.preempting_partition("7")


def test_times_are_read_whatever_way_the_user_likes_to_see_them(fake: Fake) -> None:
    fake("squeue", 'echo "RUNNING|None|${SLURM_TIME_FORMAT:-none}|N/A"')
    ask = "import rollcall.launch.scheduler.slurm as slurm; print(slurm.ask(*slurm.STATUS, '7'))"
    answer = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=ROOT,
        env={**os.environ, "SLURM_TIME_FORMAT": "relative"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "|standard|" in answer.stdout


def test_srun_gets_the_number_of_a_task(fake: Fake) -> None:
    fake("squeue", '[ "$*" = "-h -j 7_2 -o %A" ] && echo 9')
    assert "--jobid=9" in slurm.step("7_2", ["n1"])


def test_an_array_lives_as_long_as_one_of_its_tasks(fake: Fake) -> None:
    """Slurm gives one task the number of the array."""
    tasks = "7_2|7|COMPLETED|None|N/A|1\n7_1|9|RUNNING|None|N/A|1\n7_0|8|FAILED|None|N/A|1"
    fake("squeue", f'echo "{tasks}"')
    found = slurm.queue(["7"])
    assert {name: info.state for name, info in found.items() if name != "9"} == {
        **{"7": "RUNNING", "7_2": "COMPLETED", "7_1": "RUNNING", "7_0": "FAILED", "8": "FAILED"}
    }
    assert slurm.state("7") == "RUNNING"
    fake("squeue", f'echo "{tasks.replace("RUNNING", "COMPLETED")}"')
    assert slurm.state("7") == "FAILED"  # all have ended
