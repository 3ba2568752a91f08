"""A script finds under `rollcall submit` what it finds under torchrun, down to its descriptors."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkout import ROOT

from rollcall.launch.runs import states
from rollcall.launch.submission import start
from rollcall.records.attempt import NodeState
from rollcall.records.run_dir import RunDir
from rollcall.system.hosts import free_port

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
SCRIPT = '''
"""What a process can know of its surroundings."""
from __future__ import annotations  # must not reach code that is compiled later
import atexit, gc, gzip, json, logging, multiprocessing, os, pickle, random, resource, signal, sys
import threading, time, warnings
from pathlib import Path
import numpy as np
from helper import square  # beside the script

class Mine:
    pass

def late():
    """A thread that outlives main still finds the module."""
    time.sleep(0.2)
    assert pickle.loads(pickle.dumps(Mine())).__class__ is Mine
    print("late thread", flush=True)

def look(where):
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    links = {}
    for number in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            links[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # of the listing itself
            continue
    main = sys.modules["__main__"]
    umask = os.umask(0)
    os.umask(umask)
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    print(json.dumps({
        "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "flags": list(sys.flags),
        "executable": sys.executable, "path": sys.path, "cwd": os.getcwd(),
        "main": {name: repr(value) for name, value in vars(main).items() if name.startswith("__")
                 and name not in ("__builtins__", "__loader__", "__spec__", "__doc__")},
        "builtins": type(main.__builtins__).__name__, "loader": type(main.__loader__).__name__,
        "spec": main.__spec__ and main.__spec__.name, "is main": main.look is look,
        "original": multiprocessing.process.ORIGINAL_DIR,
        "parent": multiprocessing.parent_process() and "a process",
        "process": multiprocessing.current_process().name,
        "thread": threading.current_thread().name,
        "is main thread": threading.current_thread() is threading.main_thread(),
        "threads": threading.active_count(),
        "links": {name: link for name, link in links.items() if name in "012"},
        "more links": [link for name, link in links.items() if name not in "012"],
        "numpy": int(np.random.randint(1 << 62)),
        "stdin": [sys.stdin.fileno(), sys.stdin.closed],
        "stdout": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.encoding,
                   sys.stdout.errors, sys.stdout is sys.__stdout__],
        "signals": {name: status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")},
        "handlers": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
        "umask": umask, "nice": os.nice(0), "cpus": len(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "leads its group": os.getpgid(0) == os.getpid() == os.getsid(0),
        "excepthook": sys.excepthook is sys.__excepthook__, "tracing": str(sys.gettrace()),
        "exception": str(sys.exc_info()[0]),
        "logging": [logging.root.level, logging.root.manager.disable, len(logging.root.handlers)],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.callbacks],
        "env": dict(os.environ), "futures": "annotations" in dir() or eval("0") is not None,
    }), flush=True)

if __name__ == "__main__":
    how, rank = sys.argv[1], os.environ["RANK"]
    look(how)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("spawned", pool.apply(square, (3,)), flush=True)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print("forked", pool.apply(square, (4,)), flush=True)
    print("a line without an end", end="")
    os.system("echo ' of a child'")
    out = gzip.open(f"{how}-{rank}.gz", "wt")  # neither is closed
    out.write("kept")
    text = open(f"{how}-{rank}.txt", "w")
    text.write("kept")
    atexit.register(print, "atexit", flush=True)
    threading.Thread(target=late).start()
    if how == "raise":
        raise ValueError("a mistake") from KeyError("its cause")
'''
ALIKE = {"GLOO_SOCKET_IFNAME", "ROLLCALL_WORLD_SIZE", "ROLLCALL_RUN_DIR", "TORCH_CPP_LOG_LEVEL"}
"""Additional in our ranks."""
CHANGED = {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PWD", "PYTEST_CURRENT_TEST"}
CHANGED |= {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_SIGNALS_TO_HANDLE"}


def under_torchrun(place: Path, ranks: int, *words: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += [f"--master-port={free_port()}", f"--log-dir={place}/logs", "--redirects=3"]
    subprocess.run([*command, *words], cwd=place, capture_output=True, timeout=500, check=False)
    logs = [sorted(place.glob(f"logs/*/attempt_0/{rank}/std*.log")) for rank in range(ranks)]
    return ["".join(path.read_text() for path in reversed(files)) for files in logs]


def under_rollcall(place: Path, ranks: int, method: str, *words: str) -> list[str]:
    options = ["--local", "--wait", f"--nproc-per-node={ranks}", f"--start-method={method}"]
    command = [*SUBMIT, *options, f"--name={method}", "--", *words]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=500)
    assert done.returncode == ("raise" in words), done.stdout + done.stderr
    return [RunDir(place / "runs", method).log(0, 0, rank).read_text() for rank in range(ranks)]


def facts(log: str) -> dict[str, Any]:
    return dict(json.loads(log.splitlines()[0]))


def variables(found: dict[str, Any]) -> dict[str, str]:
    return {name: text for name, text in found.pop("env").items() if name not in CHANGED | ALIKE}


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "how"), [("fork", "raise"), ("fork", "end"), ("torchrun", "end")]
)
def test_a_script_finds_what_torchrun_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, how: str
) -> None:
    # A shell's job in the background ignores SIGQUIT, and only torchrun's ranks would inherit that.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for name in ("PYDANTIC_DISABLE_PLUGINS", "SLURM_TIME_FORMAT"):
        monkeypatch.delenv(name, raising=False)  # rollcall's modules have set them in this process
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("def square(x):\n    return x * x\n")
    copy = tmp_path / "runs" / method / "code"
    draws = set()
    ranks = 2 if how == "end" else 1  # torchrun would end another rank while it writes
    for theirs, mine in zip(
        under_torchrun(tmp_path, ranks, "script.py", how, "--flag"),
        under_rollcall(tmp_path, ranks, method, "script.py", how, "--flag"),
        strict=True,
    ):
        plain = facts(theirs.replace(str(tmp_path), "HERE"))
        ours = facts(mine.replace(str(copy), "HERE"))
        rank = plain["env"]["RANK"]
        draws |= {plain.pop("numpy"), ours.pop("numpy")}
        # The differences that docs/frameworks.md explains: two signals are ignored until the
        # script handles them, one asks for the stacks, and an open file takes these.
        assert plain["signals"].pop("SigIgn") != ours["signals"].pop("SigIgn")
        assert plain["signals"].pop("SigCgt") != ours["signals"].pop("SigCgt")
        for name in ("SIGUSR1", "SIGUSR2"):
            assert (plain["handlers"].pop(name), ours["handlers"].pop(name)) == ("0", "1")
        assert ours.pop("more links") == [f"/memfd:stack-of-rank-{rank} (deleted)"]
        assert plain.pop("more links") == []
        assert plain.pop("links")["0"] == ours.pop("links")["0"]
        del plain["env"]["TORCHELASTIC_ERROR_FILE"]
        assert variables(plain) == variables(ours)
        assert plain == ours
        for place in (tmp_path, copy):
            assert gzip.decompress((place / f"{how}-{rank}.gz").read_bytes()) == b"kept"
            assert (place / f"{how}-{rank}.txt").read_text() == "kept"
        told = ["\n".join(log.replace(str(copy), str(tmp_path)).splitlines()[1:])
                for log in (theirs, mine)]  # fmt: skip
        assert sorted(told[0].splitlines()) == sorted(told[1].splitlines())
    assert len(draws) == 2 * ranks


@pytest.mark.long
def test_ends_of_scripts(tmp_path: Path) -> None:
    """The first failing rank's own code; ranks that never met; what a rank leaves behind."""
    (tmp_path / "code.py").write_text(
        "import os, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if os.environ['RANK'] == '3':\n"
        "    sys.exit(3)\n"
        "dist.barrier()\n"
    )
    words = ["--local", "--wait", "--nodes=2", "--nproc-per-node=2", "--name=a", "--", "code.py"]
    done = subprocess.run([*SUBMIT, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "joined" not in done.stdout
    (tmp_path / "alone.py").write_text(
        "import os, subprocess\n"
        "if not os.fork():\n"
        "    os.execlp('sleep', 'sleep', '600.0625')\n"
        "subprocess.Popen(['sleep', '600.0625'], start_new_session=True)\n"
    )
    words[2:] = ["--nodes=1", "--nproc-per-node=2", "--name=b", "--", "alone.py"]
    done = subprocess.run([*SUBMIT, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "note: 2 ranks ran; none joined a process group" in done.stdout
    verdict = RunDir(tmp_path / "runs", "b").read_verdict()
    assert verdict is not None and verdict.state == "done" and "2 ranks ran" in verdict.reason
    assert not [one for one in psutil.process_iter(["cmdline"])
                if "600.0625" in (one.info["cmdline"] or [])]  # fmt: skip


SPAWNS = """
import argparse, os
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(index, place):
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=index, world_size=2)
    dist.all_reduce(total := torch.ones(1))
    print(f"sum {total.item()}\\n", end="")  # in one write: two processes share the log
    dist.destroy_process_group()  # or torch's threads may abort the process at its end

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("rest")
    args = parser.parse_args()
    print("local rank", args.local_rank, args.rest)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # as such scripts do
    if args.rest == "kept" and args.local_rank == 0:
        mp.spawn(work, args=(os.path.abspath("meet"),), nprocs=2)
"""


@pytest.mark.long
def test_an_older_script_gets_its_local_rank_and_may_spawn(tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    words = ["--local", "--wait", "--nproc-per-node=2", "--name=a", "--", "spawns.py", "kept"]
    done = subprocess.run([*SUBMIT, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "runs", "a")
    for rank in range(2):
        lines = run.log(0, 0, rank).read_text().splitlines()
        assert lines[0] == f"local rank {rank} kept" and lines[1:] == ["sum 2.0"] * 2 * (not rank)
    assert "joined" not in done.stdout
    given = [*words[:-1], "--local_rank=1", "own"]
    given[3] = "--name=b"
    subprocess.run([*SUBMIT, *given], cwd=tmp_path, capture_output=True)
    assert "local rank 1 own" in RunDir(tmp_path / "runs", "b").log(0, 0, 0).read_text()


@pytest.mark.long
def test_an_interrupted_script_without_a_handler_is_stopped(tmp_path: Path, bare: str) -> None:
    (tmp_path / "waits.py").write_text(
        "import time\nprint('it is up', flush=True)\ntime.sleep(600)\n"
    )
    words = ["--local", "--nproc-per-node=1", "--wait", "--name=a", bare, "--", "waits.py"]
    with subprocess.Popen(
        [*SUBMIT, *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    ) as waiting:
        assert waiting.stdout is not None
        assert any("it is up" in line for line in waiting.stdout)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(500) == 128 + signal.SIGINT
    run = RunDir(tmp_path / "runs", "a")
    verdict = run.read_verdict()
    assert verdict is not None and verdict.state == "stopped"
    assert states.look([run])[0][0].state == "stopped"
    assert start.reason_not_to_submit(run, resume=False) is None


def test_ranks_get_what_the_fabric_needs_and_the_run_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: str
) -> None:
    (tmp_path / "root/sys/class/cxi/cxi0").mkdir(parents=True)
    monkeypatch.setenv("ROLLCALL_SYSROOT", str(tmp_path / "root"))
    monkeypatch.setenv("NCCL_CROSS_NIC", "2")
    names = ("NCCL_CROSS_NIC", "FI_MR_CACHE_MONITOR")
    script = f"import os; print('has', *map(os.environ.get, {names}))\n"
    (tmp_path / "show.py").write_text(script)
    words = ["--local", "--wait", "--nproc-per-node", "1", "--name", "one", bare, "--", "show.py"]
    done = subprocess.run([*SUBMIT, *words], cwd=tmp_path, capture_output=True, text=True)
    assert "has 2 userfaultfd" in done.stdout, done.stdout + done.stderr
    state = NodeState.read(tmp_path / "runs" / "one", attempt=0, node=0)
    assert state and state.nccl and state.nccl["FI_MR_CACHE_MONITOR"] == "userfaultfd"
    assert "NCCL_CROSS_NIC" not in state.nccl


def test_handlers_of_c_end_a_rank_of_mpi(tmp_path: Path) -> None:
    """MPICH removes its shared memory in one; on_exit passes the exit code and a pointer."""
    (tmp_path / "ends.py").write_text(
        "import ctypes, sys\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.strdup.restype = ctypes.c_void_p\n"
        "text = ctypes.c_void_p(libc.strdup(b'handler of C'))\n"
        "libc.on_exit(ctypes.cast(libc.dprintf, ctypes.c_void_p), text)\n"
        "sys.exit(1)  # dprintf gets it as the file to write to\n"
    )
    words = "--local --wait --name mpi --nproc-per-node 1 --framework mpi -- ends.py"
    done = subprocess.run([*SUBMIT, *words.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "handler of C" in done.stdout, done.stderr
