"""The same program under torchrun, mpirun and alone: as the README says it."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from checkout import PACED, ROOT
from ranks import alone

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

BIN = f"{ROOT}/env/bin:{Path(sys.executable).parent}"
"""As env/run sets PATH: rollcall's torchrun before torch's."""


def run(command: list[str], cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **env},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.long
def test_torchrun_trains_the_default_recipe(tmp_path: Path) -> None:
    words = ["run.name=first", f"run.root={tmp_path}"]
    done = run(["torchrun", "--nproc_per_node=4", "-m", "train", *words])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("rollcall: 4 ranks (torchrun), cpu, ddp")
    run_dir = RunDir(tmp_path, "first")
    accuracy = [line["accuracy"] for line in read_lines(run_dir.events) if "accuracy" in line][-1]
    assert accuracy >= 0.97
    assert f"{accuracy:.2%}" in done.stdout
    assert str(run_dir.path) in done.stdout.replace("\n", "")
    assert run_dir.log(0, 0, 0).read_text() == done.stdout
    verdict = run_dir.read_verdict()
    assert verdict is not None and verdict.state == "done"
    assert sorted(path.name for path in run_dir.path.iterdir()) == [
        "checkpoints",
        "claim-0",
        "config.yaml",
        "events.jsonl",
        "logs",
        "metrics.jsonl",
        "phases.jsonl",
        "verdict.json",
    ]


@pytest.mark.long
def test_ranks_end_with_the_torchrun_that_started_them(tmp_path: Path) -> None:
    """Nobody would stop them, and another start of the run would fight them for its files."""
    start = ["rollcall", "train", "--ranks=2"]  # it becomes torchrun
    words = ["train.steps=1000000", "log.every=1", "run.name=a", f"run.root={tmp_path}", PACED]
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    run_dir = RunDir(tmp_path, "a")
    with subprocess.Popen([*start, *words], cwd=ROOT, env=env, stdout=subprocess.DEVNULL) as agent:
        deadline = time.monotonic() + 500
        while not run_dir.read_metrics():
            assert agent.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        ranks = psutil.Process(agent.pid).children()
        assert len(ranks) == 2 and run_dir.read_metrics()[-1].step
        agent.kill()
    _, alive = psutil.wait_procs(ranks, timeout=500)
    assert alive == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks"], "--ranks: expected a number of ranks such as 4, got ''"),
        (["--nproc_per_node=some", "gpt"], "--nproc_per_node: expected a number of ranks such as"),
        (["--ranks", "4", "digitz"], "unknown recipe 'digitz', did you mean 'digits'?"),
        (["--ranks", "4", "--nodes", "2"], "unknown option --nodes; `rollcall submit --nodes N`"),
    ],
)
def test_a_wrong_number_of_ranks_is_refused(words: list[str], message: str) -> None:
    done = run(["rollcall", "train", *words])
    assert done.returncode == 2 and done.stderr.startswith(f"rollcall: error: {message}")


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        (["-m", "train", "optim.lrr=1"], ["rollcall: error: unknown key 'optim.lrr'"]),
        (
            ["--nproc_per_node=two", "-m", "train"],
            ["torchrun: --nproc_per_node=two: expected a number"],
        ),
        pytest.param(
            ["fit"],
            ["torchrun: fit: no such file; for a module write -m fit"],
            marks=pytest.mark.long,
        ),
        (["-m", "rollcall.trian"], ["torchrun: -m rollcall.trian: the module is neither in"]),
        (["{}/killed.py"], ["torchrun: rank 1 was killed by SIGKILL"]),
    ],
)
def test_torchrun_reports_a_failure_in_a_line(
    tmp_path: Path, program: list[str], lines: list[str]
) -> None:
    kill = "import os, time; int(os.environ['RANK']) and os.kill(os.getpid(), 9); time.sleep(60)"
    (tmp_path / "killed.py").write_text(kill)
    words = [word.format(tmp_path) for word in program]
    done = run(["torchrun", "--nproc_per_node=2", *words])
    code = 2 if re.search("two|no such file|neither in|unknown key", done.stderr) else 1
    assert (done.returncode, done.stdout) == (code, "")
    shown = done.stderr.splitlines()
    assert len(shown) == len(lines)
    assert all(expected in line for expected, line in zip(lines, shown, strict=True))


def test_torchrun_finds_rollcall_from_any_directory(tmp_path: Path) -> None:
    words = ["torchrun", "--nproc_per_node=1", "-m", "rollcall.train", "lr=1"]
    done = run(words, tmp_path, ROLLCALL_CHECKOUT=str(ROOT))
    assert done.stderr.startswith("rollcall: error: unknown key 'lr'"), done.stderr


def test_torchrun_says_that_it_waits_for_other_nodes() -> None:
    words = ["torchrun", "--nnodes=2", "--nproc_per_node=1", "-m", "train"]
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    with subprocess.Popen(words, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr
        said = waiting.stderr.readline()
        waiting.terminate()
    assert said.startswith("torchrun: waiting for 2 nodes at 127.0.0.1:29500; --master_addr names")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_torchrun_finds_no_gpu() -> None:
    done = run(["torchrun", "--nproc_per_node=gpu", "-m", "train"])
    assert done.returncode == 2 and "torch sees no GPU on this machine" in done.stderr


REFUSED = {
    "train digitz": "unknown recipe 'digitz'",
    "train train.steps=-1": "train.steps",
    "train model.name=absent:Net": "module 'absent' is neither in",
    "train model.name=broken:Net": "broken.py:1: SyntaxError",
    "train model.name=halfway:Net": "halfway.py:1: ModuleNotFoundError",
    "train data.name=folder data.path=/absent": "data.path: /absent does not exist",
    "train device=cuda": "" if torch.cuda.is_available() else "device=cuda asks for GPUs",
    "train predict absent": "unknown run 'absent'",
}
STARTS = int(os.environ.get("ROLLCALL_REFUSED_STARTS", "2"))
"""How many refused starts to make; 100 is the long form."""


@pytest.mark.timeout(300 + 20 * STARTS)
@pytest.mark.parametrize(
    "agent",
    [
        ["torchrun"],
        pytest.param([sys.executable, "-m", "torch.distributed.run"], marks=pytest.mark.long),
    ],
)
def test_a_refusal_is_the_last_line_and_shown_once(tmp_path: Path, agent: list[str]) -> None:
    """`ROLLCALL_REFUSED_STARTS=100 pytest tests/multi/launch/test_launchers.py -k refusal`."""
    (tmp_path / "broken.py").write_text("def Net(:")
    (tmp_path / "halfway.py").write_text("import not_there\nNet = None\n")
    cases = [case for case in REFUSED.items() if case[1]]
    for start in range(STARTS):
        words, expected = cases[(start * 3 + len(agent)) % len(cases)]
        ranks = 1 + (start * 7 + 1) % 8
        command = [*agent, f"--nproc_per_node={ranks}", "-m", *words.split()]
        done = run([*command], PYTHONPATH=str(tmp_path))
        lines = (done.stdout + done.stderr).splitlines()
        said = [line for line in lines if "rollcall: error: " in line]
        assert len(said) == 1 and expected in said[0], (start, ranks, words, done)
        if agent == ["torchrun"]:
            # A mistake in the words is refused before torch is imported, others by the ranks.
            assert lines == said and done.returncode in (1, 2), (start, ranks, words)
        else:  # torch's report ends with the message of the first rank that failed, and a rule
            assert lines[-2] == said[0], (start, ranks, words, done)


def test_a_python_without_torch_is_refused() -> None:
    blocked = "import sys; sys.modules['torch'] = None; import runpy; "
    blocked += "sys.argv[1:] = ['device=cpu']; runpy.run_module('rollcall.train', None, '__main__')"
    done = run([sys.executable, "-c", blocked])
    assert done.returncode == 2
    assert "does not have the package 'torch'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_mpirun_finds_its_ranks(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None and not os.environ.get("CI"):
        pytest.skip("mpirun is not installed: apt-get install openmpi-bin runs this test")
    words = ["run.name=mpi", f"run.root={tmp_path}", "train.steps=3"]
    done = run(
        ["mpirun", "--oversubscribe", "-n", "2", sys.executable, "-m", "train", *words],
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks (mpirun)" in done.stdout


@pytest.mark.long
def test_alone_on_a_terminal_shows_a_progress_bar(tmp_path: Path) -> None:
    words = ["run.name=alone", f"run.root={tmp_path}", "train.steps=5"]
    ours, theirs = pty.openpty()
    process = alone(words, Path(os.ttyname(theirs)), TERM="xterm", COLUMNS="120")
    shown = os.read(ours, 4096)
    os.close(theirs)  # which the process has opened
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # Linux: the other side has closed the terminal
        pass
    process.join(500)
    assert process.exitcode == 0, shown
    text = shown.decode()
    assert "step 5/5" in text and "━" in text and "samples/s" in text and "loss" in text


@pytest.mark.parametrize(
    ("words", "env", "expected"),
    [
        (["optim.rl=1"], {}, "did you mean 'optim.lr'"),
        ([], {"RANK": "0"}, "has RANK but not"),
        (["device=cuda"], {}, "device=cuda asks for GPUs"),
        (["run.root=/proc/nowhere"], {}, "the run directory cannot be used"),
        (["model.name=absent:thing"], {}, "module 'absent' is neither in"),
        (["model.name=./pk/net.py:Net"], {}, "expected a module, not a file: pk.net:Net"),
        (["model.name=torch.nn:Lineer"], {}, "has no attribute 'Lineer', did you mean 'Linear'?"),
        (["data.name=mnist", "data.root=/proc/nowhere"], {}, "by hand"),
    ],
)
def test_a_bad_request_is_one_line(
    tmp_path: Path, words: list[str], env: dict[str, str], expected: str
) -> None:
    if words == ["device=cuda"] and Path("/proc/driver/nvidia").exists():
        words = ["device=cuda"]
        env = {"CUDA_VISIBLE_DEVICES": ""}
    refused = alone([f"run.root={tmp_path}", *words], tmp_path / "said", **env)
    refused.join(500)
    said = (tmp_path / "said").read_text()
    assert (refused.exitcode, expected in said, len(said.splitlines())) == (2, True, 1), said


def test_one_process_in_a_job_with_several_tasks_is_warned(tmp_path: Path) -> None:
    words = ["train.steps=1", f"run.root={tmp_path}"]
    done = alone(words, tmp_path / "said", SLURM_JOB_ID="7", SLURM_NTASKS="4")
    done.join(500)
    said = (tmp_path / "said").read_text()
    assert done.exitcode == 0 and "1 nodes and 4 tasks, but only one process" in said
