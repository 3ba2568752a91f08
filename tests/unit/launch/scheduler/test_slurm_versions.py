"""The parsers read what Slurm from 20.11 to 26.05 really prints (slurm/README.md)."""

import re
import sys
from pathlib import Path

import pytest

from rollcall.launch.scheduler import cluster, slurm
from rollcall.launch.scheduler.job import Job
from rollcall.launch.submission import preflight

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.txt"))
# Prints what was recorded for its command line; sbatch and a failure print to stderr.
ANSWER = """#!{python} -SE
import re, shlex, sys
from pathlib import Path
name, asked = Path(sys.argv[0]).name, sys.argv[1:]
for block in Path({recorded!r}).read_text().split("\\n$ ")[1:]:
    line, text = block.split("\\n", 1)
    shown, code = re.fullmatch(r"(.*?)\\? (\\d+)\\n?", text, re.DOTALL).groups()
    if shlex.split(line) == [name, *asked]:
        (sys.stderr if name == "sbatch" or code != "0" else sys.stdout).write(shown)
        sys.exit(int(code))
sys.exit(f"{{name}}: error: not recorded: {{asked}}")
"""


@pytest.fixture(params=RECORDED, ids=lambda path: path.stem)
def jobs(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Put a version's commands on PATH; return the ids of its jobs by role."""
    for name in ("sinfo", "squeue", "scontrol", "sacct", "sbatch"):
        text = ANSWER.format(python=sys.executable, recorded=str(request.param))
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = dict(re.findall(r"^# (\w+) (\d+)$", request.param.read_text(), re.MULTILINE))
    return found | {"version": request.param.stem}


def test_a_cluster_is_read_from_every_version(jobs: dict[str, str]) -> None:
    assert cluster.version() == tuple(int(part) for part in jobs["version"].split("."))
    main, _, large = cluster.partitions().values()
    assert main.is_default and main.nodes == 2 and main.limit == 3600
    assert (large.largest_job, large.limit) == (1024, slurm.UNLIMITED)
    assert large.shapes == [(4, {"a100": 4})]
    assert cluster.share_of_cpus({"a100": 2}, "large") == 2
    assert cluster.names("nodes", "main") == ["n1", "n2"]
    assert cluster.names("features") == ["fast", "ib"]
    assert cluster.names("reservations") == []
    assert cluster.configuration("MaxArraySize") == "1001"
    assert cluster.preempting_partition(jobs["run"]) == "urgent"
    assert cluster.without(jobs["large"], ["n2"], 1) == []  # n1 is excluded already


def test_jobs_are_read_from_every_version(jobs: dict[str, str]) -> None:
    roles = ("quick", "bad", "run", "het", "gone", "array", "large")
    ids = [jobs[role] for role in roles]
    states = ["COMPLETED", "FAILED", "RUNNING", "RUNNING", "CANCELLED", "PENDING", "PENDING"]
    known = slurm.queue(ids)
    assert [known[job].state for job in ids] == states
    assert known[f"{jobs['array']}_3"].start == "N/A" and known[jobs["run"]].nodes == 2
    assert slurm.queue(["999999"]) == {}
    old = slurm.accounting(ids)
    assert [old[job].state for job in ids] == states
    assert old[f"{jobs['het']}+1"].state == "RUNNING" and old[jobs["large"]].start == "N/A"
    for role in ("run", "het"):
        status = slurm.status(jobs[role])
        assert status.state == "RUNNING" and not status.is_preempted
        assert status.end < slurm.UNLIMITED
    assert slurm.status(f"{jobs['array']}_1").reason == "JobHeldUser"
    limit, used = slurm.times(jobs["run"])
    assert limit == "1:00:00" and 0 < used < 60
    assert slurm.steps(jobs["run"]) == [f"{jobs['run']}.0"]
    assert slurm.script_signal(jobs["bad"]) == 9
    assert f"--jobid={jobs['array']}" in slurm.step(f"{jobs['array']}_1", ["n1"])
    assert f"--jobid={jobs['run']}" in slurm.on_groups(jobs["run"], ["n1", "n2"])
    assert "--het-group=0,1" in slurm.on_groups(jobs["het"], ["n1", "n2"])


@pytest.mark.usefixtures("jobs")
def test_what_sbatch_says_is_read_from_every_version() -> None:
    asked = cluster.ask_for_nodes(Path("job.sh"), 2)
    assert asked.stderr is not None
    answer = asked.communicate()[1].decode()
    start = cluster.expected_start(answer)
    assert start is not None and start > 1.7e9
    assert re.search(r"to start at (\S+) .*processors on (?:nodes )?(\S+)", answer)
    job = Job("run", 2, ("true",), "/", "/slurm-%j.out", cpus_per_task=1, partition="main")
    with pytest.raises(slurm.SlurmError, match="sbatch refuses the job: invalid partition"):
        preflight.check(job, "")
