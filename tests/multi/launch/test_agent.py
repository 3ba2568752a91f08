"""Forked ranks behave like torchrun's, and a local run is the same through submit.py."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from disks import needs_root
from ranks import logged_steps

from rollcall.cli.installation import USER_PROGRAM, command, environment
from rollcall.launch.commands import cancel
from rollcall.launch.commands.stacks import ranks_of
from rollcall.launch.node.processes import ForkClient, children
from rollcall.launch.rank import fork
from rollcall.launch.rank.surroundings import Files
from rollcall.launch.runs import find, states
from rollcall.launch.runs.exit_code import CANCELLED
from rollcall.records.attempt import NodeState
from rollcall.records.run_dir import RunDir
from rollcall.system.hosts import free_port

SCRIPT = """
import atexit, os, signal, sys
atexit.register(print, "left in order")
how = sys.argv[1]
if os.environ["RANK"] == "1":
    os.system("echo from a child process")
    if how == "raise":
        raise ValueError("this rank is broken")
    if how == "code":
        sys.exit(3)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "memory":
        bytes(b"x") * (2 << 30)
    if how == "leave":
        sys.stdout.flush()
        os._exit(0)
"""
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


DRIVER = """
import json, os, sys, time
from rollcall.launch.node.processes import ForkClient
sys.executable = sys.argv[1]  # the Python of the ranks
order = json.loads(sys.argv[2])
server = ForkClient(order, os.environ)
server.start(order, None)
while (code := server.poll()) is None:
    time.sleep(0.02)
server.kill()
sys.exit(code)
"""
"""Gives an order, as a supervisor does, and ends with the exit code of the agent."""


def order_of(script: Path, name: str, logs: Path, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Return the options of an agent with two ranks, and the order of its attempt."""
    words = {"program": [str(script), *arguments], "nnodes": 1, "node_rank": 0}
    words |= {"ranks": [2], "start_method": "fork"}
    place = {"master_addr": "127.0.0.1", "master_port": free_port(), "run_id": name}
    return {**words, **place, "log_dir": str(logs), "env": {}, "roles": [], "framework": "torch"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A user's script."""
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def agent(
    script: Path, how: str, prefix: Sequence[str] = (), python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Two ranks of the script under an agent; their logs lie beside the script."""
    order = order_of(script, "test", script.parent / "logs", [how, "--flag"])
    command = [sys.executable, "-c", DRIVER, python, json.dumps(order)]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        [*prefix, *command],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )


def python_of(bare: str) -> str:
    """A Python without torch: with it, the import takes most of the time."""
    return f"{bare.partition('=')[2]}/bin/python"


def log(script: Path, rank: int) -> str:
    return (script.parent / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.parametrize(
    ("how", "code", "told", "logged"),
    [
        ("raise", 1, "rank 1 failed, exit code 1; its output: ", "ValueError: this rank is broken"),
        ("code", 3, "rank 1 failed, exit code 3; its output: ", "left in order"),
        ("signal", 137, "rank 1 was ended by SIGKILL; its output: ", ""),
        ("leave", 0, "", "from a child process"),
    ],
)
def test_ends_of_ranks(
    script: Path, how: str, code: int, told: str, logged: str, bare: str
) -> None:
    ended = agent(script, how, python=sys.executable if how == "raise" else python_of(bare))
    assert ended.returncode == code
    expected = f"node 0: {told}{script.parent}/logs/rank-1.log\n" if told else ""
    assert ended.stderr == expected
    assert logged in log(script, 1)


@pytest.mark.long
@needs_root
@pytest.mark.skipif(not MEMORY_GROUPS.exists(), reason="needs the memory controller of cgroup v1")
def test_a_rank_that_the_kernel_kills_for_its_memory_says_so(script: Path, bare: str) -> None:
    group = MEMORY_GROUPS / f"rollcall-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(1 << 30))
        prefix = ["sh", "-c", f'echo $$ >{group}/cgroup.procs; exec "$@"', "sh"]
        ended = agent(script, "memory", prefix=prefix, python=python_of(bare))
    finally:
        while (group / "cgroup.procs").read_text():
            time.sleep(0.05)
        group.rmdir()
    reason = "rank 1 was ended by SIGKILL, because its control group ran out of memory"
    assert (ended.returncode, reason in ended.stderr) == (137, True), ended.stderr


@pytest.mark.long
def test_two_local_nodes_train_and_stop_in_order(tmp_path: Path) -> None:
    """The whole local path: submit.py, submitit, two supervisors, signals, verdict, resume."""
    words = ["--local", "--nodes", "2", "--name", "it", "--wait", f"run.root={tmp_path}"]
    words += ["device=cpu", "log.every=1", "checkpoint.every=null", "train.steps=100000"]
    command = [sys.executable, str(ROOT / "launch" / "submit.py"), *words]
    run = RunDir(tmp_path, "it")

    def heed_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where pytest runs in the background

    start = partial(subprocess.Popen, command, preexec_fn=heed_interrupts, text=True)
    with start(cwd=tmp_path, stdout=subprocess.PIPE) as submit:
        try:
            end = time.monotonic() + 500
            while not logged_steps(run):
                assert time.monotonic() < end and submit.poll() is None
                time.sleep(0.1)
            submit.send_signal(signal.SIGINT)
            output = submit.communicate(timeout=500)[0]
        except BaseException:
            submit.kill()
            cancel = [sys.executable, "-m", "launch", "cancel", str(run.path)]
            subprocess.run(cancel, cwd=ROOT, check=False)
            raise
    assert submit.returncode == CANCELLED, output
    assert "rollcall: 4 ranks" in output
    verdict = run.read_verdict()
    assert verdict and verdict.state == "stopped"  # nothing on this machine queues it again
    states = [json.loads((run.job / f"attempt-0/node-{n}.json").read_text()) for n in (0, 1)]
    assert [state["state"] for state in states] == ["stopped", "stopped"]

    command[-1] = f"train.steps={verdict.step + 2}"
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout
    assert "it continues, with the code that it has" in ended.stderr
    steps = [line["step"] for line in logged_steps(run)]
    assert steps == list(range(1, verdict.step + 3))
    assert (run.path / "logs/attempt-1/node-1/rank-3.log").exists()


def test_the_next_ranks_are_forked_once_one_has_failed(tmp_path: Path) -> None:
    text = "import os; print(os.environ.get('IS_FIRST')); raise SystemExit(3)"
    (tmp_path / "script.py").write_text(text)
    server = ForkClient(order_of(tmp_path / "script.py", "", tmp_path) | {"ranks": [1]}, os.environ)

    def attempt(name: str) -> tuple[int, set[int | None]]:
        """Return the exit code, and the process ids of its agent."""
        order = order_of(tmp_path / "script.py", name, tmp_path / name) | {"ranks": [1]}
        server.start({**order, "env": {"IS_FIRST": str(name == "first")}}, None)
        agents = set[int | None]()
        while (code := server.poll()) is None:
            agents.add(server.agent)
            time.sleep(0.01)
        return code, agents

    def waiting() -> int:
        [agent] = children(server.pids[0])
        return agent

    try:
        assert attempt("first")[0] == 3
        agent = waiting()
        code, agents = attempt("second")
        assert (code, agent in agents) == (3, True)
        assert (tmp_path / "second" / "rank-0.log").read_text() == "False\n"
        os.kill(waiting(), signal.SIGKILL)
        assert attempt("third")[0] == 128 + signal.SIGKILL
        assert attempt("fourth")[0] == 3
    finally:
        server.kill()


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "torchrun"])
def test_a_run_without_submit_is_live_and_its_ranks_are_found(tmp_path: Path, method: str) -> None:
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(100)")
    words = ["supervise", "--nproc-per-node=2", f"--start-method={method}", "--", "waits.py"]
    with subprocess.Popen(command(*words), cwd=tmp_path, env=environment()) as process:
        try:
            while not (logs := [*tmp_path.glob("runs/*/logs/attempt-0/node-0/rank-1.log")]):
                assert process.poll() is None
                time.sleep(0.05)
            run = find.find_all(str(tmp_path / "runs"))[0]
            assert states.look([run])[0][0].state == "running"
            while sorted(ranks_of(logs[0].parent).values()) != [0, 1]:
                time.sleep(0.05)
            assert cancel.main([run.name, f"--root={tmp_path}/runs"]) == 0
            process.wait(500)
            assert states.look([run])[0][0].state != "running"
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("import os, sys\nimport torch.distributed as dist\n", False),
        ("import torch\noptimizer = torch.optim.SGD\n", True),
        ("import torch\nfrom theirs import train\n", True),
    ],
)
def test_scripts_without_an_optimizer_need_no_compiler(
    tmp_path: Path, text: str, may: bool
) -> None:
    (tmp_path / "script.py").write_text(text)
    assert fork.may_optimize([str(tmp_path / "script.py")]) is may
    assert fork.may_optimize([*USER_PROGRAM, str(tmp_path), "script.py", "--lr=1"]) is may
    assert fork.may_optimize([*USER_PROGRAM, str(tmp_path), "-m", "script"])


@pytest.mark.long
def test_startup_prints_its_tables() -> None:
    words = ["startup", "--repeats", "1", "--nproc-per-node", "1", "device=cpu", "model.name=mlp"]
    command = [sys.executable, "-m", "rollcall.tools.bench", *words]
    table = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert table.returncode == 0, table.stderr
    rows = [line.split("  ")[0] for line in table.stdout.splitlines()]
    starts = {"torchrun, bare script", "torchrun -m train", "supervisor", "bare script, forked"}
    assert starts | {"import submitit", "import of the schema", "submit --dry-run"} <= {*rows}
    assert rows[0] == f"$ rollcall bench {' '.join(words)}"


def test_node_0_stays_while_another_node_works_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork, "LEAVE_LOOK", 0.1)
    logs = tmp_path / "logs" / "attempt-0" / "node-0"
    options = Namespace(node_rank=0, nnodes=2, log_dir=str(logs))
    (tmp_path / "job" / "attempt-0").mkdir(parents=True)
    other = NodeState(0, 1, "b", "running", time.time(), 1)
    with ThreadPoolExecutor() as threads:
        store = Files(logs.parent / "exchange", "node-0")
        leaving = threads.submit(fork._leave, store, options)
        with pytest.raises(TimeoutError):
            leaving.result(1)  # a shared disk may show the record late
        other.write(tmp_path)
        with pytest.raises(TimeoutError):
            leaving.result(1)
        replace(other, state="stopped").write(tmp_path)  # its ranks were asked to stop
        leaving.result(20)


def test_what_the_migration_page_writes_in_python_is_true_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = {"node_rank": 1, "nnodes": 2, "nproc_per_node": 4, "ranks": (2, 4), "first_rank": 2}
    place = {"master_addr": "10.0.0.1", "master_port": 20000, "run_id": "x"}
    rank = fork.environment(Namespace(**node, **place, roles=()), 3)
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    page = (ROOT / "docs" / "migration.md").read_text()
    written = set(re.findall(r"`(int\(os\.environ[^`]*)`", page))
    found = {line: eval(line) for line in written}  # a page of ours
    assert found == {'int(os.environ["RANK"])': 5, 'int(os.environ["LOCAL_RANK"])': 3}
    assert (rank["LOCAL_WORLD_SIZE"], rank["GROUP_WORLD_SIZE"]) == ("4", "2")
