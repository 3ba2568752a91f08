"""Following, explaining and steering runs on a real cluster."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import PACED, ROOT
from lab import Lab, wait_until
from ranks import logged_steps

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
ENDLESS = ["device=cpu", "train.steps=1000000", "log.every=1", "checkpoint.every=null", PACED]
BROKEN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(100):
    dist.all_reduce(torch.ones(1))
    if step == 3 and dist.get_rank() == 3:
        raise ValueError("rank 3 is broken")
"""


def events(run: RunDir, name: str) -> list[dict[str, object]]:
    return [line for line in read_lines(run.events) if line["event"] == name]


class Steered:
    """A run and the commands of the launcher, typed on the login host."""

    def __init__(self, lab: Lab, run: RunDir):
        self.lab = lab
        self.run = run

    def submit(self, *words: str, cwd: Path = ROOT) -> str:
        """Submit it; return the id of the job."""
        place = ["--name", self.run.name, "--root", str(self.run.path.parent)]
        done = self.lab.exec("login", *SUBMIT, "--nodes", "2", *place, *words, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(next(read_lines(self.run.job / "submissions.jsonl"))["job"])

    def type(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m launch COMMAND RUN …`."""
        python = [sys.executable, "-m", "launch", command, "--root", str(self.run.path.parent)]
        return self.lab.exec("login", *python, self.run.name, *words, cwd=ROOT)

    def says(self, command: str, *words: str) -> str:
        """What a command prints; it must succeed."""
        done = self.type(command, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state(self) -> str:
        """The second column of its line in the table."""
        return self.says("status").splitlines()[1].split()[1]


@pytest.fixture(scope="module")
def live(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steered]:
    """A run on two nodes that goes on until the tests end it."""
    run = Steered(lab, RunDir(tmp_path_factory.mktemp("steer"), "live"))
    job = run.submit(*ENDLESS)
    # `status` shows the steps of metrics.jsonl, whose first line comes after that event.
    wait_until(lambda: bool(logged_steps(run.run)), 500, lambda: "there is no step")
    yield run
    lab.exec("login", "scancel", job)
    lab.wait_job(job)


def test_a_live_run_is_shown(lab: Lab, live: Steered) -> None:
    row = live.says("status").splitlines()[1].split()
    assert row[:2] == ["live", "running"]
    assert row[2].endswith("/1,000,000")
    assert "has not failed: running" in live.says("why")
    assert "step 1/1000000" in live.says("logs")
    assert "[rank 0] step 1/1000000" in live.says("logs", "--merge")
    wait_until(
        lambda: "step " in lab.output("login", "squeue", "-h", "-o", "%k"),
        500,
        lambda: "the job has no comment",
    )


def test_stacks_of_all_ranks(live: Steered) -> None:
    shown = live.says("stacks")
    headings = [line for line in shown.splitlines() if line.startswith("rank")]
    numbers = [word.strip(",") for line in headings for word in line.split(" on ")[0].split()[1:]]
    assert sorted(numbers) == ["0", "1", "2", "3"]
    assert "/train/trainer.py" in shown and "in _steps" in shown
    assert "rank/agent.py" not in shown
    assert live.state() == "running"


def test_a_command_on_a_node(live: Steered) -> None:
    second = next(read_lines(live.run.job / "attempts.jsonl"))["hosts"][1]
    assert live.says("attach", "--node", "1", "hostname").split() == [second]
    assert live.says("attach", "--node", "1", "--", "cat", "/etc/hostname") != ""
    refused = live.type("attach", "--node", "2", "true")
    assert (refused.returncode, "has nodes 0 to 1" in refused.stderr) == (2, True)


def test_a_waiting_run_tells_why_and_can_be_cancelled(lab: Lab, live: Steered) -> None:
    waiting = Steered(lab, RunDir(live.run.path.parent, "waiting"))
    job = waiting.submit("--nodes", "4", "--cpus-per-task", "8")
    wait_until(lambda: lab.job(job, "Reason") != "None", 500, lambda: "Slurm gives no reason")
    shown = waiting.says("status")
    assert "pending" in shown and "the nodes it needs are busy" in shown
    waiting.says("cancel")
    assert lab.wait_job(job) == "CANCELLED"
    assert waiting.state() == "stopped"


def test_preempted_requeued_without_a_wait_and_cancelled(lab: Lab, live: Steered) -> None:
    urgent = ["--parsable", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null"]
    job = lab.output("login", "sbatch", *urgent, "--wrap", "sleep 300")
    wait_until(lambda: live.state() == "pending", 500, lambda: f"it is {live.state()}")
    assert " again: " in live.says("status")
    lab.output("login", "scancel", job)
    for attempt in (1, 2):  # it waits, and is let go; it runs, and starts again
        live.says("requeue")
        started = live.run.job / f"attempt-{attempt}" / "node-0.json"
        # By itself Slurm lets it wait for two minutes.
        wait_until(started.exists, 500, lambda: "it has not restarted")
        steps = attempt + 1
        wait_until(
            lambda steps=steps: len(events(live.run, "first_step")) == steps,  # type: ignore[misc]
            500,
            lambda: "there is no step",
        )
    saved = [line["step"] for line in events(live.run, "checkpointed")]
    assert [line["step"] for line in events(live.run, "resumed")] == saved
    assert 0 < int(str(saved[0])) < int(str(saved[1]))
    row, _, rest = live.says("status").splitlines()[1].partition("restarted")
    assert row.split()[-3] == "3" and rest, "attempts"

    follow = [sys.executable, "-m", "launch", "logs", "--follow", str(live.run.path)]
    with subprocess.Popen(
        lab.argv("login", *follow), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as following:
        live.says("cancel")
        output = following.communicate(timeout=500)[0]
    assert following.returncode == 0
    assert "asked to stop by SIGTERM" in output  # the summary: it has followed to the end
    lab.wait_job(str(next(read_lines(live.run.job / "submissions.jsonl"))["job"]))
    assert live.state() == "stopped"
    refused = live.type("cancel")
    assert (refused.returncode, "has no live job: stopped" in refused.stderr) == (2, True)


def test_why_names_the_rank_and_host_that_failed_first(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    broken = Steered(lab, RunDir(tmp_path / "runs", "broken"))
    job = broken.submit("--", "broken.py", cwd=tmp_path)
    # Fake GPUs: a run that has them and does not say device=cpu is refused by its ranks.
    refused = Steered(lab, RunDir(tmp_path / "runs", "refused"))
    other = refused.submit("--nodes", "1", "--gpus-per-node", "1", "train.steps=1")
    assert [lab.wait_job(name) for name in (job, other)] == ["FAILED", "FAILED"]

    host = next(read_lines(broken.run.job / "attempts.jsonl"))["hosts"][1]
    first, folded, *rest = broken.says("why").splitlines()
    assert f"rank 3 on {host} (node 1) raised ValueError: rank 3 is broken" in first
    assert folded == "  3 ranks ended because of it"
    assert rest[-1].endswith("ValueError: rank 3 is broken")
    assert broken.state() == "failed"
    said = refused.says("why")
    assert "rank 0 on" in said and "refused the request" in said
    assert "| rollcall: error: " in said and "device=cpu" in said


def test_states_are_right_with_slurmdbd_stopped_too(lab: Lab, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    scripts = {"done": "", "failed": "raise SystemExit(3)", "alive": "import time; time.sleep(300)"}
    jobs = {}
    for name, text in {**scripts, "held": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
        one = ["--nodes", "1", "--nproc-per-node", "1", *(["--hold"] if name == "held" else [])]
        jobs[name] = Steered(lab, RunDir(root, name)).submit(*one, "--", f"{name}.py", cwd=tmp_path)
    wait_until(lambda: lab.job(jobs["alive"], "JobState") == "RUNNING", 500, lambda: "it waits")
    assert [lab.wait_job(jobs[name]) for name in ("done", "failed")] == ["COMPLETED", "FAILED"]
    # As if Slurm had forgotten them: a job that it never had. One was ended without a word.
    for name, source in {"gone": "done", "silent": "failed"}.items():
        shutil.copytree(root / source, root / name)
        for path in (root / name / "job").glob("*.jsonl"):
            path.write_text(path.read_text().replace(f'"{jobs[source]}"', '"999999"'))
    (root / "silent" / "verdict.json").unlink()
    told = (root / "silent" / "job" / "attempts.jsonl").read_text().splitlines(keepends=True)
    (root / "silent" / "job" / "attempts.jsonl").write_text(told[0])

    expected = {"done": "done", "failed": "failed", "alive": "running", "held": "pending"}
    expected |= {"gone": "done", "silent": "lost"}
    slurmdbd = int(Path(f"/var/lib/rollcall-lab/{lab.name}/slurmdbd.pid").read_text())
    status = [sys.executable, "-m", "launch", "status", "--root", str(root)]
    try:
        for number in (signal.SIGCONT, signal.SIGSTOP):
            os.kill(slurmdbd, number)
            shown = lab.exec("login", *status, cwd=ROOT).stdout
            rows = [line.split()[:2] for line in shown.splitlines()[1:]]
            assert sorted(rows) == sorted([name, state] for name, state in expected.items())
            assert "it is held: release it with scontrol release" in shown
    finally:
        os.kill(slurmdbd, signal.SIGCONT)
    for name in ("alive", "held"):
        Steered(lab, RunDir(root, name)).says("cancel")
        assert lab.wait_job(jobs[name]) == "CANCELLED"


def test_no_such_run(lab: Lab, tmp_path: Path) -> None:
    nobody = Steered(lab, RunDir(tmp_path, "nobody"))
    for command in ("status", "logs", "why", "cancel", "requeue", "attach", "stacks"):
        refused = nobody.type(command)
        assert refused.returncode == 2, command
        assert "there is no run 'nobody'" in refused.stderr
    assert list(tmp_path.iterdir()) == []
