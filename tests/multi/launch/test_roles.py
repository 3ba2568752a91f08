"""Ranks with roles: each finds the others in TF_CONFIG, and servers are ended with the run."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from checkout import ROOT

from rollcall.records.run_dir import RunDir

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py"), "--local", "--wait"]
# A chief asks each server for its name, or fails; servers never end, as tf.distribute.Server does.
SCRIPT = """
import json, os, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
print(role, index, *(os.environ[f"ROLE_{name}"] for name in ("NAME", "RANK", "WORLD_SIZE")))
print("cluster", *config["cluster"], flush=True)
servers = "ps worker".split() if "chief" in config["cluster"] else ["ps"]
if role in servers:
    host, port = config["cluster"][role][index].rsplit(":", 1)
    with socket.create_server((host, int(port))) as server:
        while True:
            peer, _ = server.accept()
            peer.sendall(f"{role} {index}".encode())
            peer.close()
elif role in ("chief", "worker"):
    for address in [it for name in servers for it in config["cluster"][name]]:
        host, port = address.rsplit(":", 1)
        while True:
            try:
                peer = socket.create_connection((host, int(port)))
                break
            except ConnectionError:
                time.sleep(0.05)
        print("met", peer.recv(99).decode(), flush=True)
    sys.exit(int(sys.argv[1]))
"""


def submit(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (place / "servers.py").write_text(SCRIPT)
    command = [*SUBMIT, "--name=roles", *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=200)


def left(place: Path) -> list[int]:
    """The processes that still work on a run."""
    commands = ((it.pid, it.info["cmdline"] or []) for it in psutil.process_iter(["cmdline"]))
    return [pid for pid, words in commands if any(str(place) in word for word in words)]


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_servers_end_with_the_chief(tmp_path: Path, nodes: int) -> None:
    roles = "chief,ps:2,worker:2,evaluator"
    done = submit(tmp_path, f"--nodes={nodes}", f"--roles={roles}", "--", "servers.py", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "runs", "roles")
    per_node = 6 // nodes
    logs = [run.log(0, rank // per_node, rank).read_text().splitlines() for rank in range(6)]
    assert logs[0] == [
        *("chief 0 chief 0 1", "cluster chief ps worker"),
        *("met ps 0", "met ps 1", "met worker 0", "met worker 1"),
    ]
    assert [log[0] for log in logs[1:]] == [
        *("ps 0 ps 0 2", "ps 1 ps 1 2", "worker 0 worker 0 2", "worker 1 worker 1 2"),
        "evaluator 0 evaluator 0 1",
    ]
    assert logs[5][1] == "cluster chief ps worker evaluator"
    verdict = run.read_verdict()
    assert verdict is not None and verdict.state == "done"
    assert left(tmp_path) == []


@pytest.mark.long
def test_without_a_chief_workers_train_and_servers_end_with_the_last(tmp_path: Path) -> None:
    done = submit(tmp_path, "--nodes=2", "--roles=ps,worker:2", "--", "servers.py", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "runs", "roles")
    assert [run.log(0, *at).read_text().split("met ")[1:] for at in ((0, 1), (1, 2))] == [
        ["ps 0\n"],
        ["ps 0\n"],
    ]
    assert left(tmp_path) == []


@pytest.mark.long
def test_a_failed_chief_is_named_and_servers_end(tmp_path: Path) -> None:
    done = submit(tmp_path, "--nodes=2", "--roles=chief,ps,worker:2", "--", "servers.py", "3")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "rank 0 failed, exit code 3" in done.stdout + done.stderr
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--roles=chief,wroker:3", "--"], "such as chief,ps:2,worker:3; not 'wroker:3'"),
        (["--roles=worker,worker:2", "--"], "not 'worker:2'"),
        (["--roles=ps:2", "--"], "ps:2 never ends: add a chief or workers"),
        (["--roles=ps,worker", "--nproc-per-node=3", "--"], "has 2 ranks, and the run has 3"),
        (["--roles=ps,worker", "--nodes=1-2", "--"], "has a fixed number of nodes"),
        (["--roles=ps,worker", "--start-method=torchrun", "--"], "and --start-method fork"),
    ],
)
def test_roles_that_do_not_fit_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    done = submit(tmp_path, *words, "servers.py", "0")
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_a_script_that_needs_roles_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "ps.py").write_text("# tf.distribute.ParameterServerStrategy(resolver)")
    done = subprocess.run(
        [*SUBMIT, "--dry-run", "--", "ps.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "without --roles, such as chief,ps:1,worker:2" in done.stdout + done.stderr
