"""submit.py up to the moment of submitting: what it shows, refuses, copies and costs."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from checkout import ROOT
from disks import mounted, needs_root

from rollcall.cli.installation import PACKAGED
from rollcall.config import ConfigError, parse
from rollcall.launch.doctor import storage
from rollcall.launch.runs import find
from rollcall.launch.runs.processes import Processes
from rollcall.launch.scheduler import slurm
from rollcall.launch.submission import (
    command,
    executors,
    layers,
    options,
    preflight,
    snapshot,
    start,
)
from rollcall.launch.submission.plan import SubmissionPlan, TakenError, plan
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import word
from rollcall.records.attempt import AttemptEvent, NodeState
from rollcall.records.job import JobRecord, Submission
from rollcall.records.run_dir import RunDir, State, Verdict

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]


def submit(
    *words: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SUBMIT, *words], cwd=cwd, env=os.environ | (env or {}), capture_output=True, text=True
    )


def test_dry_run_shows_script_and_code_and_writes_nothing(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.touch(mode=0o755)
    shown = submit(
        *("--dry-run", "--nodes", "2", "--name", "here", "--time", "02:00", "train.steps=5"),
        cwd=tmp_path,
        env={"PATH": f"{fake.parent}:{os.environ['PATH']}"},
    )
    assert shown.returncode == 0, shown.stderr
    assert "--time 02:00 is 2 minutes and 0 seconds" in shown.stderr
    for part in (
        "#SBATCH --nodes=2\n",
        f"#SBATCH --output={tmp_path}/runs/here/job/slurm-%j.out\n",
        f"-- -m rollcall.train train.steps=5 data.root={tmp_path}/datasets\n",
        f"# run directory: {tmp_path}/runs/here\n",
        f"MB, from {ROOT} (",
    ):
        assert part in shown.stdout
    assert sorted(tmp_path.rglob("*")) == [fake.parent, fake]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lrr=1"], "unknown key 'optim.lrr', did you mean 'optim.lr'?"),
        (["--nodes", "0"], "--nodes: expected a whole number of at least 1, not '0'"),
        (["--time", "2h"], "'2h' is not a valid Slurm time limit"),
        (["--name", "../x"], "--name: expected letters"),
        (
            ["--partiton", "x"],
            "not an option of rollcall submit or of sbatch, did you mean '--partition'?",
        ),
        (["--task-per-node", "2"], "of sbatch; instead of --tasks-per-node: one task per node"),
        (["--batch-size", "32"], "or of sbatch; write data.global_batch=32 ("),
        (["--ntasks=2"], "--ntasks: one task per node starts that node's ranks; use --nodes"),
        (["--mount", "a" * 300], "only a container needs it"),
        (["--xyzzy"], "or of sbatch; pass an option of a plugin on with --sbatch-arg=--xyzzy"),
        (["-n", "4"], "--ntasks: one task per node"),
        (["--gres"], "--gres: expected a value"),
        (
            ["--local", "--chain", "2"],
            "--chain: a run on this machine is one job; remove --chain or --local",
        ),
        (["--local", "--array", "0-x"], "--array 0-x: expected indices such as 0-7"),
        (["--root", "/scrach/runs"], "/scrach does not exist, only /; correct --root"),
        (["--root", sys.executable], f"{sys.executable} is a file; choose another directory"),
        (["fit.py", "seed=1"], "fit.py is a script, not a recipe; put `--` before it"),
        (["multi_node.sbatch"], "is a job script, not a recipe; submit it: sbatch multi_node"),
        (["--", "gone.py"], "gone.py: no such file"),
        (["--", "-m", "gone.module"], "-m gone.module: no module gone in"),
        (["--", "/bin/sh"], "/bin/sh is outside"),
        (["digits", "--", "/bin/sh"], "got both 'digits' and a program after `--`"),
        (
            ["--gpus-per-node", "99", "--local"],
            "--gpus-per-node: 1 node would need 99 GPUs",
        ),
    ],
)
def test_refusals_write_nothing(tmp_path: Path, words: list[str], message: str) -> None:
    refused = submit(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpt data.name=text data.path=.,*.md", "*.md does not exist; expected the path of your"),
        ("data.name=folder data.path=/absent/x", "data.path: /absent/x does not exist"),
        ("data.name=folder data.path=.", "data.path=.: expected a directory with a directory"),
        ("model.init=/absent/net.pt", "model.init=/absent/net.pt: no such file, folder or run"),
        ("parallel.mesh=tensor=3", "parallel.mesh=tensor=3 needs 3 ranks, but got 4"),
        ("--nproc-per-node 1,3 parallel.strategy=hsdp", "needs the same number of ranks on every"),
        ("log.to=mlflow", "log.to=mlflow needs the package mlflow"),
    ],
)
def test_what_would_end_a_training_at_its_start_is_not_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    line, setup = layers.read(["--local", "--nodes=2", "--nproc-per-node=2", *words.split()])
    with pytest.raises((RefusedError, ConfigError), match=re.escape(message)):
        plan(line, words.split(), setup)


def test_paths_that_only_the_nodes_have_are_noted_and_own_ones_work_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "is_available", lambda: True)
    for words in (["model.init=/proc/absent.pt"], ["--dependency=afterok:1", "model.init=absent"]):
        line, setup = layers.read(["--nodes=2", *words])
        plan(line, words, setup)
        assert "every node of the job needs it" in capsys.readouterr().err
    (tmp_path / "net.pt").touch()
    line, setup = layers.read(["model.init=net.pt"])
    command = plan(line, [], setup).job.command
    assert command[-1] == f"model.init={tmp_path}/net.pt"  # the ranks work in a copy without it
    assert not capsys.readouterr().err


@pytest.mark.parametrize("words", [["launch/submit.py"], ["-m", "train"], ["-m", "launch"]])
def test_a_python_without_the_packages_is_told_of_env_run(words: list[str]) -> None:
    # -S: without site-packages.
    done = subprocess.run([sys.executable, "-S", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Put ./env/run before the command" in done.stderr
    assert "Traceback" not in done.stderr


def test_dry_run_imports_nothing_heavy(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", SUBMIT[1], "--dry-run"]
    traced = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in traced.stderr.splitlines()}
    assert "rollcall.config" in imported
    heavy = {
        "torch",
        "numpy",
        "submitit",
        "psutil",
        "rich",
    }
    assert not imported & heavy


def test_sbatchs_letters_are_understood() -> None:
    words = ["-N2", "-p", "gpu", "-t", "1:00:00", "-A", "team", "-Ja100", "-H", "-C", "a|b"]
    own, passed, program, *_ = options.read([*words, "--", "fit.py", "-N9"])
    assert (own.nodes, own.partition, own.time, own.name) == ((2, 2), "gpu", "1:00:00", "a100")
    assert passed == {"account": "team", "hold": None, "constraint": "a|b"}
    assert program == ("fit.py", "-N9")


def test_torchruns_spellings_are_understood() -> None:
    words = ["--nnodes=2-4", "--nproc_per_node", "3", "--gpus_per_node=1", "--mail_type", "END"]
    own, passed, *_ = options.read(words)
    assert (own.nodes, own.nproc_per_node, own.gpus_per_node) == ((2, 4), "3", "1")
    assert passed == {"mail-type": "END"}
    assert options.asked(words)["nproc-per-node"] == "3"
    assert options.read(["--ranks-per-node", "2"]).own.nproc_per_node == "2"


def test_a_checkout_that_lacks_objects_of_git_can_be_submitted(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "fit.py").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    blob = subprocess.check_output([*git, "rev-parse", "HEAD:fit.py"], text=True).strip()
    (tmp_path / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    (tmp_path / "fit.py").write_text("2")
    run = RunDir(tmp_path / "runs", "a")
    run.job.mkdir(parents=True)
    found = snapshot.plan(tmp_path, [run.path.parent])
    snapshot.take(found, run.code, run.job / "source", run.path.parent / ".code")
    assert found.is_modified and (run.code / "fit.py").read_text() == "2"
    told = (run.job / "source.diff").read_text()
    assert told.startswith("# The changes are unknown: git diff fails in") and blob in told


def test_a_package_that_only_supervisors_need_is_missed_at_once(tmp_path: Path) -> None:
    (tmp_path / "fit.py").touch()
    code = "import sys; sys.modules['psutil'] = None; import runpy; sys.argv[:1] = ['rollcall']; "
    code += f"sys.path[0] = {str(ROOT)!r}; from rollcall.cli.program import run; run('submit')"
    words = [sys.executable, "-c", code, "--local", "--name=a", "--", "fit.py"]
    refused = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "does not have the package 'psutil', which rollcall needs" in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit.py"]


def test_a_run_that_goes_on_may_take_new_code(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text("first")
    run = RunDir(tmp_path / "runs", "a")
    for text in ("first", "second", "third"):
        (tmp_path / "fit.py").write_text(text)
        run.job.mkdir(parents=True, exist_ok=True)
        found = snapshot.plan(tmp_path, [run.path.parent])
        snapshot.take(found, run.code, run.job / "source", run.path.parent / ".code")
        step = run.code / "tb" / "checkpoints"  # written by the script
        step.mkdir(parents=True, exist_ok=True)
        (step / text).touch()
    written = [path.name for path in (run.code / "tb" / "checkpoints").iterdir()]
    assert sorted(written) == ["first", "second", "third"]
    assert [path.name for path in (run.path / "code-1").iterdir()] == ["fit.py"]
    codes = [run.code, run.path / "code-0", run.path / "code-1"]
    assert [(code / "fit.py").read_text() for code in codes] == ["third", "first", "second"]
    assert sorted(path.name for path in run.job.iterdir()) == [
        *("source-0.json", "source-1.json", "source.json")
    ]
    shutil.rmtree(run.path / "code-0")  # to have room
    snapshot.take(found, run.code, run.job / "source", run.path.parent / ".code")
    assert (run.path / "code-2" / "fit.py").read_text() == "third"
    words = ["--local", "--dry-run", "--name", "a"]
    kept, renewed = (
        submit(*words, *more, "--", "fit.py", cwd=tmp_path).stdout for more in ([], ["--new-code"])
    )
    assert "# code: the run keeps the code that it has" in kept
    assert "# code: 1 files, 0.0 MB, from" in renewed


def test_a_script_of_ones_own_is_copied_from_its_checkout(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "fit.py").touch()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    words = ["--dry-run", "--qos", "high", "--exclusive", "--name", "a", "--", "fit.py", "--gres"]
    shown = submit(*words, cwd=tmp_path / "tools").stdout
    runs = tmp_path / "tools" / "runs"
    assert f"-- -m rollcall.launch.rank.user_program {runs}/a/code/tools fit.py --gres\n" in shown
    assert f"# code: 1 files, 0.0 MB, from {tmp_path} (" in shown
    (tmp_path / ".gitignore").write_text("fit.py")
    refused = submit("--dry-run", "--", "fit.py", cwd=tmp_path / "tools")
    assert "fit.py: git ignores it, so the run's copy would not have it" in refused.stderr


def test_a_training_takes_the_directory_whose_modules_it_names(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    (tools / "recipes").mkdir(parents=True)
    (tools / "recipes" / "mine.yaml").write_text("model: {name: 'mymodel:Net'}\n")
    (tools / "mymodel.py").write_text("class Net:\n    pass\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    words = ["--dry-run", "--name", "a", "recipes/mine.yaml"]
    run = tools / "runs" / "a"
    shown = submit(*words, cwd=tools).stdout
    place = f"rollcall.launch.rank.user_program {run}/code/tools"
    assert f"-- -m {place} -m rollcall.train {run}/job/mine.yaml " in shown
    assert f"cd {run}/job/rollcall" in shown
    assert f"# code: 2 files, 0.0 MB, from {tmp_path} (" in shown
    # A module that is elsewhere on PYTHONPATH needs no copy of this directory.
    env = {"PYTHONPATH": str(tools)}
    elsewhere = submit("--dry-run", "--name", "a", "model.name=mymodel:Net", cwd=tmp_path, env=env)
    assert f"MB, from {ROOT} (" in elsewhere.stdout
    (tmp_path / ".gitignore").write_text("mymodel.py")
    again = submit(*words, cwd=tools).stdout  # what is imported is copied, though git ignores it
    assert f"# code: 3 files, 0.0 MB, from {tmp_path} (" in again


def test_our_other_commands_are_no_training(tmp_path: Path) -> None:
    words = ["--dry-run", "--root", str(tmp_path), "--name", "a", "--", "-m", "train"]
    predicts = submit(*words, "predict", "trained", cwd=ROOT).stdout
    assert (
        f"-- -m rollcall.launch.rank.user_program {tmp_path}/a/code -m train predict trained\n"
        in predicts
    )
    assert "-- -m rollcall.train digits" in submit(*words, "digits", cwd=ROOT).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "--resume, --new-code: add --name RUN (rollcall status lists them)"),
        (["--new-code", "digits"], "--resume, --new-code: add --name RUN"),
        (["--nproc-per-node=gpu"], "not gpu. Without it, there is one rank per GPU"),
        (["--standalone"], "not an option of rollcall submit or of sbatch; the launcher sets it"),
        (["--rdzv_backend=c10d"], "; the launcher sets it"),
    ],
)
def test_words_that_would_start_something_else_are_refused(
    tmp_path: Path, words: list[str], message: str
) -> None:
    answer = submit("--local", *words, cwd=tmp_path)
    assert (answer.returncode, message in answer.stderr) == (2, True), answer.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("state", "code", "message"),
    [
        ("done", 0, "run a is finished (it was so): nothing is submitted; --resume continues it"),
        ("failed", 2, "run a has failed (it was so): add --resume to continue it"),
    ],
)
def test_a_run_that_has_ended_is_told_and_not_submitted(
    tmp_path: Path, state: State, code: int, message: str
) -> None:
    run = RunDir(tmp_path / "runs", "a")
    run.create()
    run.conclude(Verdict(state, 1, "it was so"))
    before = sorted(tmp_path.rglob("*"))
    answer = submit("--local", "--name", "a", cwd=tmp_path)
    assert (answer.returncode, message in answer.stderr) == (code, True), answer.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        (
            "12+0|12|RUNNING|None|N/A|1\n12+1|13|RUNNING|None|N/A|2",
            "job 12+0 RUNNING, job 12+1 RUNNING",
        ),
        (
            "12_0|13|RUNNING|None|N/A|1\n12_1|12|PENDING|None|N/A|1",
            "job 12_0 RUNNING, job 12_1 PENDING",
        ),
    ],
)
def test_a_run_is_live_while_its_groups_or_tasks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, told: str
) -> None:
    run = RunDir(tmp_path, "a")
    run.job.mkdir(parents=True)
    Submission("12", 1.0).append(run.path)
    for name in ("sbatch", "squeue"):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<END\n{listed}\nEND\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert f"is live ({told}" in str(start.reason_not_to_submit(run, False))


@pytest.mark.parametrize("left", ["task", "supervisor"])
def test_a_run_is_live_while_a_part_of_its_killed_job_is(tmp_path: Path, left: str) -> None:
    run, task = RunDir(tmp_path, "a"), tmp_path / "a" / "task-0" / "job"
    task.mkdir(parents=True)
    run.job.mkdir()
    (run.job / "4000000_0_log.out").touch()
    JobRecord(str(run.path), 1).write(run.path)
    Submission("4000000", 1.0).append(run.path)
    assert start.reason_not_to_submit(run, True) is None
    waits = shlex.join([sys.executable, "-c", "input()"])
    lines = {
        "task": f"exec {waits} submitit.local._local {task}",
        "supervisor": f"exec {waits} supervise",
    }
    with subprocess.Popen(["sh", "-c", lines[left]], stdin=subprocess.PIPE) as process:
        if left == "supervisor":
            host = socket.gethostname()
            AttemptEvent(1, "4000000", "started", 2.0, hosts=[host], ranks=2).append(run.path)
            (run.job / "attempt-1").mkdir()
            part = NodeState(1, 0, host, "running", time.time(), process.pid)
            part.write(run.path)
        end = time.monotonic() + 10
        while (reason := start.reason_not_to_submit(run, True)) is None:
            assert time.monotonic() < end
        assert f"is live (process {process.pid} on this machine)" in reason
        if left == "supervisor":  # a later process with the id of one that is gone
            replace(part, started=2.0).write(run.path)
            assert start.reason_not_to_submit(run, True) is None
        process.communicate(b"\n")


def test_a_run_is_not_live_because_one_in_its_directory_is(tmp_path: Path) -> None:
    outer, inner = RunDir(tmp_path, "a"), RunDir(tmp_path / "a", "inner")
    inner.job.mkdir(parents=True)
    outer.job.mkdir()
    waits = f"{sys.executable} -c 'print(flush=True); input()'"
    line = f"exec {waits} submitit.local._local {inner.job}"
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", line], stdin=pipe, stdout=pipe) as process:
        assert process.stdout and process.stdout.readline()
        assert (Processes().of(inner), Processes().of(outer)) == ([process.pid], [])
        process.communicate(b"\n")


def test_two_submissions_at_once_do_not_make_one_run(tmp_path: Path) -> None:
    argv = ["--root", str(tmp_path), "--name", "a", "digits"]
    line, setup = layers.read(argv)
    one, other = (plan(line, argv, setup) for _ in range(2))
    with start._prepared(one):
        with pytest.raises(TakenError), start._prepared(other):
            pass
        assert (one.run.job / "job.json").exists()
    one, other = (plan(line, argv, setup) for _ in range(2))

    def prepare() -> None:
        with start._prepared(other):
            pass

    with ThreadPoolExecutor() as pool:
        with start._prepared(
            one
        ):  # of a run that exists: the other one waits until its job is known
            waiting = pool.submit(prepare)
            time.sleep(0.3)
            start._record(one, "7")
        with pytest.raises(TakenError):
            waiting.result()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SubmissionPlan:
    """The submission of a run of a script, to start on this machine or by a stand-in for srun."""
    (tmp_path / "srun").write_text(
        f"#!/bin/bash\ntrap 'echo asked >>{tmp_path}/told' USR2; echo $$ >{tmp_path}/up\n"
        "for _ in {1..50}; do sleep 0.1; done\n"
    )
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "fit.py").write_text("input()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["--local", "--name=a", "--time=infinite", "--", "fit.py"]
    line, setup = layers.read(words)
    return plan(line, words, setup)


@pytest.mark.parametrize("receiver", ["this thread", "another thread, as in a notebook"])
def test_ctrl_c_before_sbatch_answers_cancels_what_it_has_queued(
    script: SubmissionPlan, receiver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []
    sleeper = threading.Thread(target=(is_over := threading.Event()).wait)
    sleeper.start()

    def queued(_: executors.Slurm) -> str:
        ident = threading.get_ident() if receiver == "this thread" else sleeper.ident
        signal.pthread_kill(ident or 0, signal.SIGINT)
        time.sleep(0.05)  # Python acts upon it between two of its instructions
        return "7"

    monkeypatch.setattr(executors.Slurm, "start", queued)
    monkeypatch.setattr(slurm, "tell", lambda *words: commands.append(words))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start._submit(script, script.job)
    finally:
        signal.signal(signal.SIGINT, before)
        is_over.set()
    assert commands == [("scancel", "7")]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ctrl_c_in_an_allocation_asks_once_and_then_does_not_wait(
    script: SubmissionPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        while not (tmp_path / "up").exists() or not (tmp_path / "up").read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "follow", interrupted)
    allocated = replace(script, job=replace(script.job, allocation="7"))
    assert command.carry_out(allocated, local=False, dry_run=False) == 128 + signal.SIGINT
    step = int((tmp_path / "up").read_text())
    while not (tmp_path / "told").exists():  # bash runs the trap when its sleep has ended
        time.sleep(0.1)
    time.sleep(0.2)
    os.kill(step, signal.SIGTERM)
    assert (tmp_path / "told").read_text() == "asked\n"


@pytest.mark.parametrize("kind", ["local", "allocation"])
def test_a_run_without_its_record_does_not_go_on(
    script: SubmissionPlan, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[psutil.Process] = []
    before = set(psutil.Process().children())  # of other tests, such as the server of data workers

    def fail(*_: object) -> None:
        started.extend(set(psutil.Process().children()) - before)
        raise OSError(errno.EIO, "Input/output error", "submissions.jsonl")

    monkeypatch.setattr(start, "_record", fail)
    with pytest.raises(RefusedError, match=r"submissions.jsonl: Input"):
        start._on_this_machine(script) if kind == "local" else start._in_allocation(script, "7")
    assert not script.run.path.exists() and started
    assert not psutil.wait_procs(started, timeout=2)[1]


def test_places_in_memory_or_below_tmp_are_node_local(tmp_path: Path) -> None:
    assert storage.is_node_local(Path("/dev/shm/runs"))
    assert storage.is_node_local(Path("/tmp/runs"))
    assert not storage.is_node_local(Path("/usr"))
    assert preflight.problem(tmp_path / "runs") is None
    assert preflight.problem(tmp_path / "50%") is None
    assert "Slurm replaces %a" in str(preflight.problem(tmp_path / "50%a")), (
        "submitit puts a number there"
    )
    assert preflight.problem(tmp_path / "a" / "b" / "runs") == (
        f"{tmp_path}/a/b does not exist, only {tmp_path}; correct --root, or run "
        f"`mkdir -p {tmp_path}/a/b`"
    )


def test_snapshot_has_what_is_not_ignored_and_says_what_changed(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e"]
    files = {
        "kept": "1",
        "edited": "1",
        "gone": "1",
        ".gitignore": "*.log\n",
        "a/b": "",
        "c/d": "",
        "pipe": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (root / "edited").write_text("2")
    for name in ("gone", "pipe", "a/b", "c/d"):
        (root / name).unlink()
    os.mkfifo(root / "pipe")  # which nobody writes: whoever opens it waits
    (root / "a").rmdir()
    (root / "a").touch()
    (root / "c").rmdir()
    (root / "c").symlink_to("../far")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "d").touch()
    (root / "a.log").touch()
    (root / "new é '\n").write_text("new")
    (root / "runs" / "old").mkdir(parents=True)
    (root / "runs" / "old" / "config.yaml").touch()

    found = snapshot.plan(root, leave_out=[root / "runs"])
    assert "pipe" not in found.files
    run = RunDir(tmp_path, "run")
    run.create()
    run.job.mkdir()
    snapshot.take(found, run.code, run.job / "source", tmp_path / ".code")

    copied = {str(path.relative_to(run.code)) for path in run.code.rglob("*")}
    assert copied == {"kept", "edited", ".gitignore", "new é '\n", "a", "c"}
    assert (run.code / "c" / "d").exists()  # though the link is relative
    assert (run.code / "edited").read_text() == "2"
    source = json.loads((run.job / "source.json").read_text())
    assert source["modified"] and len(source["commit"]) == 40
    assert "-1\n" in (run.job / "source.diff").read_text()


def shared_by(folder: Path) -> dict[str, int]:
    """How many names each file below a directory has on disk."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_nlink for path in files}


def test_runs_share_equal_code_and_not_what_they_write(tmp_path: Path) -> None:
    root, kept = tmp_path / "checkout", tmp_path / ".code"
    (root / "tools").mkdir(parents=True)
    (root / "fit.py").write_text("first")
    (root / "tools" / "go.sh").write_text("go")
    (root / "tools" / "go.sh").chmod(0o755)
    (root / "model.pt").write_text("saved here once")

    def submitted(name: str) -> RunDir:
        run = RunDir(tmp_path, name)
        run.job.mkdir(parents=True)
        snapshot.take(snapshot.plan(root, [tmp_path]), run.code, run.job / "source", kept)
        return run

    one = submitted("one")
    two = submitted("two")
    again = submitted("again")
    for run in (one, two, again):  # the third name is the store's
        assert shared_by(run.code) == {"fit.py": 4, "tools/go.sh": 4, "model.pt": 1}
    assert os.access(two.code / "tools" / "go.sh", os.X_OK)
    assert not (two.code / "fit.py").stat().st_mode & 0o222

    (one.code / "model.pt").write_text("the first run's")  # as torch.save does
    (one.code / "new.txt").write_text("the first run's")
    assert (two.code / "model.pt").read_text() == "saved here once"
    assert not (two.code / "new.txt").exists()

    (root / "fit.py").write_text("edited")
    edited = submitted("edited")
    assert shared_by(edited.code) == {"fit.py": 2, "tools/go.sh": 5, "model.pt": 1}
    assert ((one.code / "fit.py").read_text(), (edited.code / "fit.py").read_text()) == (
        "first",
        "edited",
    )
    (edited.code / "fit.py").chmod(0o644)  # who insists, or is root, writes into a shared file
    (edited.code / "fit.py").write_text("spoilt")
    assert (submitted("after").code / "fit.py").read_text() == "edited"
    shutil.rmtree(edited.path)
    (root / "fit.py").write_text("edited again")
    submitted("last")
    assert len(list(kept.iterdir())) == 4  # first, edited, edited again, go.sh
    shutil.rmtree(kept)
    assert (two.code / "fit.py").read_text() == "first"
    kept.mkdir()
    kept.chmod(0o777)  # others could put code of theirs there
    assert set(shared_by(submitted("alone").code).values()) == {1}
    assert list(kept.iterdir()) == []


def test_snapshot_outside_git_takes_the_packages(tmp_path: Path) -> None:
    (tmp_path / "train" / "__pycache__").mkdir(parents=True)
    (tmp_path / "train" / "a.py").touch()
    os.mkfifo(tmp_path / "train" / "pipe")
    (tmp_path / "train" / "__pycache__" / "a.pyc").touch()
    (tmp_path / "elsewhere").touch()
    found = snapshot.plan(tmp_path, [tmp_path / "runs"], PACKAGED)
    assert found.files == ("train/a.py",)
    assert "not a git checkout" in found.describe()


def test_variables_of_a_surrounding_job_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_CONF", "SBATCH_PARTITION", "SRUN_DEBUG", "PMI_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES", "KEPT"):
        monkeypatch.setenv(name, "1")
    executors.clear_inherited_environment()
    assert os.environ["SLURM_CONF"] == os.environ["KEPT"] == "1"
    left = {"SLURM_JOB_ID", "SBATCH_PARTITION", "SRUN_DEBUG", "PMI_RANK", "RANK", "MASTER_ADDR"}
    assert not (left | {"TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"}) & set(os.environ)


@pytest.mark.parametrize("name", ["plain", "2024", "no", "null", "0x1f", "a.b-c_d"])
def test_words_are_read_back_as_text(name: str) -> None:
    assert parse([word("run.name", name)])[1].run.name == name
    root = f"/a b/{name}: #'\""
    assert parse([word("run.root", root)])[1].run.root == root


def git(*words: str, cwd: Path) -> None:
    own = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *own, *words], cwd=cwd, check=True, capture_output=True)


@pytest.mark.parametrize(
    "settings",
    [[], ["diff.external=true"], ["color.ui=always"], ["diff.noprefix=true"]],
    ids=str,
)
def test_a_checkout_that_is_not_utf8_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(settings)))
    for number, (key, _, value) in enumerate(text.partition("=") for text in settings):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    code = tmp_path / "code"
    code.mkdir()
    name = os.fsdecode(b"caf\xe9.txt")
    (code / name).write_bytes(b"caf\xe9 = 1\n")
    git("init", "-q", cwd=code)
    git("add", "-A", cwd=code)
    git("commit", "-qm", "first", cwd=code)
    (code / name).write_bytes(b"caf\xe9 = 2\n")
    found = snapshot.plan(code, [])
    assert b"-caf\xe9 = 1\n+caf\xe9 = 2\n" in found.diff
    assert found.diff.startswith(b'diff --git "a/')
    job = tmp_path / "run" / "job"
    job.mkdir(parents=True)
    snapshot.take(found, tmp_path / "run" / "code", job / "source", tmp_path / ".code")
    assert (tmp_path / "run" / "code" / name).read_bytes() == b"caf\xe9 = 2\n"
    assert (job / "source.diff").read_bytes() == found.diff


@needs_root
@pytest.mark.parametrize("options", ["size=200k", "size=50m,nr_inodes=40"])
def test_without_room_nothing_is_left_and_the_message_names_the_place(
    tmp_path: Path, options: str
) -> None:
    with mounted(tmp_path / "disk", "tmpfs", options.removeprefix("size=")) as root:
        refused = submit("--local", "--name", "it", "--root", str(root), cwd=tmp_path)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr
        assert f"{root}/it: No space left on device: {root} has " in refused.stderr
        assert not [path for path in root.rglob("*") if path.is_file()]


def test_ranks_do_not_start_from_code_that_lacks_a_file(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    for name in ("script.py", "module.py", "data.txt"):
        (code / name).write_text("x = 1\n")
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    snapshot.take(snapshot.plan(code, []), run.code, run.job / "source", tmp_path / ".code")

    def supervise() -> str:
        words = ["-m", "rollcall", "supervise", "--run-dir", str(run.path), "--nproc-per-node=1"]
        words += ["--", str(run.code / "script.py")]
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=500
        )
        return f"{done.returncode} {done.stderr}"

    (run.code / "data.txt").unlink()  # a script may remove its data
    (run.code / "module.py").unlink()
    (run.code / "module.py").write_text("x = 2\n")
    told = supervise()
    assert told.startswith("0 ") and f"note: {run.code}/module.py has changed" in told
    (run.code / "module.py").unlink()
    told = supervise()
    assert told.startswith("2 ") and f"{run.code}/module.py is missing" in told
    assert "--new-code" in told and "Traceback" not in told
    assert len(find.attempts(run)) == 1


def test_options_may_stand_between_words() -> None:
    own = options.read(["digits", "seed=1", "--nodes", "2", "train.steps=3"]).own
    assert (own.nodes, own.words) == ((2, 2), ["digits", "seed=1", "train.steps=3"])
