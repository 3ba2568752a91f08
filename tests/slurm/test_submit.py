"""Runs on a real cluster: submitted, by template, refused, killed, asked to stop.

In the lab every host's own name is 127.0.1.1 in its /etc/hosts, as Debian's installer leaves it:
that no run here looks for its peers there is part of what these tests show.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
import pytest
from checkout import ROOT
from lab import BOTH_TRACKERS, Lab, wait_until
from ranks import logged_steps

from rollcall.records.run_dir import RunDir
from rollcall.system import hosts
from rollcall.system.files import read_lines

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
SHORT = ["device=cpu", "train.steps=20", "log.every=1"]
ENDLESS = ["device=cpu", "train.steps=1000000", "log.every=1", "checkpoint.every=null"]


def losses(run: RunDir) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in logged_steps(run)}


@dataclass
class Runs:
    """One run each way, started side by side."""

    local: RunDir
    submitted: RunDir
    multi_node: RunDir
    single_node: RunDir
    output: str
    taken_port: int


@pytest.fixture(scope="module")
def runs(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The same 20 steps on 4 ranks, four ways; one of them finds its port taken."""
    root = tmp_path_factory.mktemp("a place with 'quotes'")
    place = {name: RunDir(root, name) for name in ("local", "submitted", "multi", "single")}

    def words(name: str) -> list[str]:
        return [*SHORT, f"run.name={name}", f"run.root={json.dumps(str(root))}"]

    def submit_template(template: str, *options: str, name: str) -> str:
        script = str(ROOT / "slurm" / template)
        answer = lab.exec(
            "login", "sbatch", "--parsable", f"--output={root}/%j.out", *options, script,
            *words(name), cwd=ROOT,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip()

    multi = submit_template(
        "multi_node.sbatch", "--hold", "--nodelist=n[3-4]", "--gpus-per-node=2", name="multi"
    )
    port = hosts.port(f"{multi}.0.0")
    listen = f"import socket, time; s = socket.create_server(('', {port})); print(1, flush=True)"
    holder = lab.argv("n3", sys.executable, "-c", f"{listen}; time.sleep(300)")
    with subprocess.Popen(holder, stdout=subprocess.PIPE) as taken:
        assert taken.stdout and taken.stdout.readline()
        lab.output("login", "scontrol", "release", multi)
        single = submit_template("single_node.sbatch", "--gpus-per-node=4", name="single")
        options = ["--nodes", "2", "--gpus-per-node", "2", "--wait"]
        submitted = lab.exec("login", *SUBMIT, *options, *words("submitted"), timeout=500)
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        for job in (multi, single):
            assert lab.wait_job(job) == "COMPLETED", (root / f"{job}.out").read_text()
        taken.kill()
    local = [*SUBMIT, "--local", "--nproc-per-node", "4", "--wait", *words("local")]
    subprocess.run(local, check=True, capture_output=True, timeout=500)
    return Runs(
        place["local"], place["submitted"], place["multi"], place["single"], submitted.stdout, port
    )


def test_all_ways_reach_the_same_losses(runs: Runs) -> None:
    expected = losses(runs.local)
    assert list(expected) == list(range(1, 21))
    assert losses(runs.submitted) == expected
    assert losses(runs.multi_node) == expected
    assert losses(runs.single_node) == expected


def test_ranks_are_on_two_hosts_with_their_own_addresses(lab: Lab, runs: Runs) -> None:
    attempt = next(read_lines(runs.submitted.job / "attempts.jsonl"))
    assert (len(set(attempt["hosts"])), attempt["ranks"]) == (2, 4)
    logs = sorted(runs.submitted.path.glob("logs/attempt-0/*/rank-*.log"))
    assert [log.name for log in logs] == [f"rank-{rank}.log" for rank in range(4)]
    head = attempt["hosts"][0]
    assert lab.output(head, "getent", "hosts", head).split()[0] == "127.0.1.1"
    meeting = json.loads(next(runs.submitted.job.glob("rendezvous/*.json")).read_text())
    assert meeting["host"] == head
    assert meeting["address"] in lab.output(head, "hostname", "-I").split()


def test_a_taken_port_is_passed_over(runs: Runs) -> None:
    meeting = json.loads(next(runs.multi_node.job.glob("rendezvous/*.json")).read_text())
    assert meeting["port"] == runs.taken_port + 1


def test_waiting_shows_the_training_and_the_run_keeps_what_was_submitted(runs: Runs) -> None:
    assert "step 20/20" in runs.output
    run = runs.submitted
    assert (run.code / "launch" / "submit.py").read_text() == (
        ROOT / "launch/submit.py"
    ).read_text()
    assert (run.code / "launch" / "submit.py").samefile(runs.local.code / "launch" / "submit.py")
    job = next(read_lines(run.job / "submissions.jsonl"))
    assert "--gpus-per-node" in job["argv"]
    assert "#SBATCH --nodes=2" in (run.job / f"{job['job']}_submission.sh").read_text()
    assert list(run.path.rglob("*.pkl")) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--partition", "mian"],
            "--partition mian: no such partition; this cluster has main, urgent",
        ),
        (["--nodes", "5"], "--nodes 5: a job in partition main can have 4 at most"),
        (["--time", "3:00:00"], "--time 3:00:00: the limit of partition main is 1:00:00"),
        (["optim.lrr=1"], "unknown key 'optim.lrr', did you mean 'optim.lr'?"),
        (["--gpus-per-node", "5"], "no node of partition main has more than 4 GPUs"),
        (
            ["--nodelist", "n9"],
            "Invalid node name specified; the nodes of this cluster are n1, n2, n3, n4",
        ),
        (["--constraint", "fast"], "; the features of this cluster are none"),
        (["--reservation", "mine"], "; the reservations of this cluster are none"),
        (
            ["--gres", "gpu:h100:1"],
            "provide all of --cpus-per-task 1, --gres gpu:h100:1; its nodes have 8 CPUs, ",
        ),
        (["--gres", "gpu:9"], "--gres gpu:9: no node of partition main has more than 4 GPUs"),
        (["--array", "0-1001"], "--array 0-1001: the largest index on this cluster is 1000"),
        (
            ["--nodes", "2", "--root", "/tmp"],
            "only this machine can see /tmp; 2 nodes need a --root",
        ),
        (["--root", "/scrach/runs"], "/scrach does not exist, only /"),
        (["--segment", "2"], "sbatch refuses the job: unrecognized option"),
    ],
)
def test_refusals_queue_nothing_and_leave_nothing(
    lab: Lab, tmp_path: Path, words: list[str], message: str
) -> None:
    root = [] if "--root" in words else [f"run.root={tmp_path}"]
    refused = lab.exec("login", *SUBMIT, *words, *root)
    assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr
    assert "Traceback" not in refused.stderr
    assert lab.output("login", "squeue", "-h") == ""
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(lab: Lab) -> None:
    # By root too: a file system that is mounted read-only, for this command alone.
    command = f"mount -t tmpfs -o ro none /mnt && exec {' '.join(SUBMIT)} --root /mnt/runs"
    refused = lab.exec("login", "unshare", "--mount", "sh", "-c", command)
    assert (
        refused.returncode,
        "/mnt: you do not have permission to write there" in refused.stderr,
    ) == (2, True)


def node_list(random: Random) -> str:
    """A node list as Slurm may write it: brackets in several places, ranges, leading zeros."""

    def number() -> str:
        width = random.choice((1, 1, 2, 3))
        first = random.randrange(10**width)
        last = min(first + random.randrange(12), 10**width - 1)
        return f"{first:0{width}}" + (f"-{last:0{width}}" if random.random() < 0.6 else "")

    def name() -> str:
        brackets = random.choice((0, 1, 1, 2))
        numbers = ",".join(number() for _ in range(random.randint(1, 3)))
        stem = random.choice(("n", "node", "rack-a", "gpu0x"))
        return stem + ("", f"[{numbers}]", f"[{numbers}]r1u[{number()}]")[brackets]

    return ",".join(name() for _ in range(random.randint(1, 3)))


def test_node_lists_are_read_as_slurm_reads_them(lab: Lab, tmp_path: Path) -> None:
    lists = [node_list(Random(seed)) for seed in range(1000)]
    (tmp_path / "lists").write_text("\n".join(lists) + "\n")
    ask = 'while read -r list; do scontrol show hostnames "$list" | paste -sd" "; done <"$0"'
    told = lab.output("login", "bash", "-c", ask, f"{tmp_path}/lists").splitlines()
    assert len(told) == 1000
    for text, names in zip(lists, told, strict=True):
        assert hosts.expand(text) == names.split(), text


def agents(job: str, root: Path) -> set[str]:
    """The hosts on which the parent of a job's ranks runs; another lab may have the same number."""
    hosts = set()
    for process in psutil.process_iter(["cmdline", "environ"]):
        command, env = process.info["cmdline"] or [], process.info["environ"] or {}
        is_of_run = any(str(root) in word for word in (*command, *env.values()))
        is_agent = "rollcall.launch.rank.agent" in command
        if is_agent and is_of_run and env.get("SLURM_JOB_ID") == job:
            hosts.add(env["SLURMD_NODENAME"])
    return hosts


@BOTH_TRACKERS
def test_a_signal_before_the_first_step_is_not_lost(lab: Lab, tmp_path: Path) -> None:
    """What `--signal=B:USR2` does before the time is up, at its worst moment."""
    run = RunDir(tmp_path, "early")
    options = ["--nodes", "2", "--name", "early", "--no-requeue"]
    lab.output("login", *SUBMIT, *options, f"run.root={tmp_path}", *ENDLESS)
    job = next(read_lines(run.job / "submissions.jsonl"))["job"]
    wait_until(lambda: len(agents(job, tmp_path)) == 2, 500, lambda: "there are no agents")
    lab.output("login", "scancel", f"--signal={signal.SIGUSR2.name}", "--batch", job)
    lab.wait_job(job)
    output = (run.job / f"slurm-{job}.out").read_text()
    assert f"batch: job {job} of run early could not be requeued: scontrol refuses: " in output
    verdict = run.read_verdict()
    assert verdict is not None, (run.job / f"slurm-{job}.out").read_text()
    assert (verdict.state, verdict.reason) == ("requeue", "asked to stop by SIGUSR2")
    ended = list(read_lines(run.job / "attempts.jsonl"))[-1]
    assert (ended["state"], ended["exit_code"]) == ("stopped", os.EX_TEMPFAIL)
