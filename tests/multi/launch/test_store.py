"""Where ranks of one machine meet, nobody from another machine can knock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from checkout import PACED, ROOT

from rollcall.records.run_dir import RunDir
from rollcall.system import guard
from rollcall.system.files import read_lines

TRAIN = ["-m", "train", "digits", "device=cpu", "train.steps=1000000", "checkpoint.every=null"]
TRAIN += [PACED]
DEADLINE = 120


def listeners(process: psutil.Process) -> set[str]:
    """The addresses on which a process and all below it listen for TCP."""
    family = [process, *process.children(recursive=True)]
    sockets = (found for member in family for found in member.net_connections("tcp"))
    return {found.laddr.ip for found in sockets if found.status == psutil.CONN_LISTEN}


def ports_at(address: str, process: psutil.Process) -> set[int]:
    """The ports of this address on which a process listens for TCP."""
    sockets = (found for found in process.net_connections("tcp") if found.laddr)
    return {it.laddr.port for it in sockets if (it.laddr.ip, it.status) == (address, "LISTEN")}


def may_read_the_store(host: str, port: int) -> bool:
    """Ask the store of a run for its keys, as its own user."""
    code = (
        "from datetime import timedelta; from torch.distributed import TCPStore\n"
        f"assert TCPStore({host!r}, {port}, timeout=timedelta(seconds=5)).num_keys() > 0"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["supervise", "mpirun"])
def test_a_run_listens_on_the_address_that_its_ranks_use(launcher: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path, "run")
    command = [sys.executable, "-m", "launch", "supervise", f"--run-dir={run.path}", "--", *TRAIN]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if launcher == "mpirun":
        if shutil.which("mpirun") is None and not os.environ.get("CI"):
            pytest.skip("mpirun is not installed: apt-get install openmpi-bin runs this test")
        command = ["mpirun", "--oversubscribe", "-n", "2", sys.executable, *TRAIN]
        command += ["run.name=run", f"run.root={tmp_path}"]
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        end = time.monotonic() + DEADLINE
        while not any(line["event"] == "first_step" for line in read_lines(run.events)):
            assert process.poll() is None and time.monotonic() < end, (
                tmp_path / "output"
            ).read_text()
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = [member for member in family if "train" in member.cmdline()]
        found = set().union(*(listeners(rank) for rank in ranks))
        ports = {port for member in family for port in ports_at(guard.INNER, member)}
        assert len(ports) == 1
        answers = [may_read_the_store(host, *ports) for host in ("127.0.0.1", guard.INNER)]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE)
    assert found - {guard.INNER} == {"127.0.0.1"}
    assert answers == [True, False]
