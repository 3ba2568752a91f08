"""The doctor names the host with a planted defect, and a spare takes the place of a bad host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkout import ROOT, SHORT_TEXT
from lab import Lab, running_lab

from rollcall.launch.doctor.checkup import LATE as LATE_CHECK
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

ROLLCALL = [sys.executable, str(ROOT / "env" / "bin" / "rollcall")]
BAD = "n3"
MINE = "/tmp/mine"
"""A directory that each host of the lab has for itself."""


@pytest.fixture(scope="module")
def own_lab(lab_options: list[str]) -> Iterator[Lab]:
    """A lab of its own: the plantings would disturb other tests."""
    with running_lab(f"doctor-{os.getpid()}", "--nodes", "4", "--gpus", "0", *lab_options) as lab:
        for host in ("n1", "n2", BAD, "n4"):
            lab.output(host, "bash", "-c", f"mkdir -p {MINE}")
            if host != BAD:  # the lab's hosts are installed like Debian: their name is 127.0.1.1
                line = (
                    f"sed '/127.0.1.1/d' /etc/hosts >{MINE}/hosts; echo 10.42.0.10{host[1]} {host}"
                )
                lab.output(
                    host, "bash", "-c", f"{line} >>{MINE}/hosts; mount -B {MINE}/hosts /etc/hosts"
                )
        yield lab


def daemon_of(lab: Lab, host: str) -> int:
    """Return the process id of a host's Slurm daemon."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "slurmd" and lab.has(process.pid, host):
            return process.pid
    raise AssertionError(f"{host} has no daemon")


def plant(lab: Lab, place: Path) -> subprocess.Popen[bytes]:
    """Plant all defects on one host; return the foreign process."""
    package = Path(psutil.__file__).parents[1]
    metadata = next(package.glob("psutil-*.dist-info")) / "METADATA"
    version = psutil.__version__
    lines = [
        "mount -o remount,size=100M /dev/shm",
        f"mkdir {MINE}/full && mount -t tmpfs -o size=4M full {MINE}/full",
        f"head -c 5M /dev/zero >{MINE}/full/file 2>/dev/null || true",
        f"sed 's/^Version: {version}/Version: 1.2.3/' {metadata} >{MINE}/metadata",
        f"mount -B {MINE}/metadata {metadata}",
        f"echo different >{MINE}/code.py && mount -B {MINE}/code.py {place}/code.py",
        "ip link set dev eth0 mtu 1400",
        f"sed 's/ n1$/ x/; s/ n2$/ n1/; s/ x$/ n2/' /etc/hosts >{MINE}/swapped",
        f"mount -B {MINE}/swapped /etc/hosts",
        f"prlimit --pid {daemon_of(lab, BAD)} --nofile=300:300",
    ]
    lab.output(BAD, "bash", "-ec", "\n".join(lines))
    for host in ("n1", "n2", "n4"):
        lab.output(host, "mkdir", "-p", f"{MINE}/full")
    # Not nice: on a busy machine, it would otherwise get too little of a CPU to be noticed. Where
    # the kernel groups processes by session, the priority of the group counts.
    first = "echo -20 >/proc/$$/autogroup 2>/dev/null"
    loop = lab.argv(BAD, "nice", "-n", "-15", "bash", "-c", f"{first}; while :; do :; done")
    return subprocess.Popen(loop, cwd="/", start_new_session=True)


def diagnose(lab: Lab, place: Path) -> tuple[int, dict[str, Any]]:
    env = {"TMPDIR": f"{MINE}/full"}
    submit = [*ROLLCALL, "submit", "--doctor", "--nodes=4", f"--root={place}/runs", "--json"]
    done = lab.exec("login", "env", *[f"{k}={v}" for k, v in env.items()], *submit, cwd=place)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


PLANTED = (
    *("shared-memory", "own-name", "free-space", "writing", "open-files"),
    *("packages", "code", "foreign-processes", "mtu", "connections"),
)


@pytest.mark.campaign
def test_the_doctor_marks_the_odd_host_in_each_planted_defect(own_lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("equal = True\n")
    loop = plant(own_lab, tmp_path)
    try:
        code, found = diagnose(own_lab, tmp_path)
    finally:
        loop.kill()
        loop.wait()
        own_lab.output(BAD, "umount", "/etc/hosts")
    assert code == 1 and sorted(found["nodes"]) == ["n1", "n2", "n3", "n4"]
    for name in PLANTED:
        states = {host: results[name]["state"] for host, results in found["nodes"].items()}
        odd = {each["node"] for each in found["odd"].get(name, [])}
        # A busy machine answers late: another host then warns of a connection.
        kinds = ("bad",) if name == "connections" else ("bad", "warning")
        bad = {host for host, state in states.items() if state in kinds}
        assert BAD in odd | bad and odd | bad == {BAD}, (name, states, found["odd"].get(name))
    sums = [results["all-reduce"] for results in found["nodes"].values()]
    assert all(each["state"] == "ok" or LATE_CHECK in each["text"] for each in sums), sums
    # The two names are swapped; on a busy machine, one of the hosts may answer too late.
    assert re.search("the name n[12] leads to n[12]", found["nodes"][BAD]["connections"]["text"])
    assert "psutil 1.2.3" in found["odd"]["packages"][0]["has"]
    assert found["odd"]["mtu"] == [{"node": BAD, "has": "1400", "usual": "1500"}]


def test_a_spare_takes_the_place_of_a_bad_host(own_lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nprint('rank on', os.uname().nodename)\n")
    own_lab.output(BAD, "mount", "-o", "remount,size=100M", "/dev/shm")
    state, run = {"XDG_STATE_HOME": str(tmp_path / "state")}, RunDir(tmp_path / "runs", "it")
    words = ["--nodes=2", "--spares=2", "--preflight", "--nproc-per-node=1", "--name=it", "--wait"]
    submit = [*ROLLCALL, "submit", *words, f"--root={tmp_path}/runs", "--", "script.py"]
    done = own_lab.exec("login", *submit, cwd=tmp_path, env=state)
    assert done.returncode == 0, done.stdout + done.stderr
    hosts = next(read_lines(run.job / "attempts.jsonl"))["hosts"]
    assert BAD not in hosts and len(hosts) == 2, hosts
    output = "\n".join(path.read_text() for path in run.job.glob("*.out"))
    assert f"leaves out {BAD}: " in output, output
    assert "the preflight took" in output, output
    told = own_lab.exec("login", *ROLLCALL, "nodes", env=state).stdout
    assert BAD in told and "shared-memory" in told, told
    # The next job of this user avoids the host, until the user forgets what is known of it.
    again = [*ROLLCALL, "submit", "--dry-run", "--nodes=2", "--preflight", "--", "script.py"]
    shown = own_lab.exec("login", *again, cwd=tmp_path, env=state)
    assert f"--exclude={BAD}" in shown.stdout, shown.stdout + shown.stderr
    assert own_lab.exec("login", *ROLLCALL, "nodes", "--forget", BAD, env=state).returncode == 0
    assert "--exclude" not in own_lab.exec("login", *again, cwd=tmp_path, env=state).stdout


def test_network_names_the_host_with_a_slow_link(own_lab: Lab, tmp_path: Path) -> None:
    limit = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "20mbit")
    own_lab.output("n2", *limit, "burst", "32k", "latency", "50ms")
    words = ["--nodes=4", "--nproc-per-node=1", f"--root={tmp_path}/runs", "--name=it"]
    measure = [*ROLLCALL, "network", *words, "--", "--sizes=64K", "--json"]
    done = own_lab.exec("login", *measure, cwd=ROOT)
    own_lab.output("n2", "tc", "qdisc", "del", "dev", "eth0", "root")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    assert found["hosts"] == ["n1", "n2", "n3", "n4"] and found["interface"] == "eth0"
    # The limit delays what n2 sends, and by that the acknowledgements of what it receives.
    # On a busy machine others may be named too, but none is as slow as what n2 sends.
    assert any(text.startswith(("slow host: n2 ", "slow link: n2 to ")) for text in found["slow"])
    sent, others = found["links"].pop(1), [row[:1] + row[2:] for row in found["links"]]
    assert max(sent) < min(rate for row in others for rate in row if rate), found
    assert {row["kind"] for row in found["collectives"]} >= {"all-reduce", "all-to-all"}
    assert all(row["bus"] > 0 for row in found["collectives"])


@pytest.mark.timeout(1200)
def test_accept_passes_on_two_hosts_and_names_what_is_wrong_on_others(
    own_lab: Lab, tmp_path: Path
) -> None:
    words = [*ROLLCALL, "accept", f"--root={tmp_path}", "--nodes=2", "--nproc-per-node=1"]

    def accept(name: str, hosts: str, *more: str) -> tuple[int, dict[str, dict[str, Any]], str]:
        asked = [f"--name={name}", f"--nodelist={hosts}"]
        done = own_lab.exec("login", *words, *asked, *more, cwd=tmp_path, timeout=500)
        page = tmp_path / name / "accept.json"
        assert page.exists(), done.stdout + done.stderr
        rows = json.loads(page.read_text())["rows"]
        return done.returncode, {row["check"]: row for row in rows}, done.stdout + done.stderr

    # Most of its time would go into validating the text of the whole standard library.
    code, rows, said = accept("fine", "n1,n4", "--", SHORT_TEXT)
    assert code == 0 and len(rows) == 18, said
    assert "of the wire's" in rows["bandwidth"]["text"], said
    assert "rank 1 got SIGKILL" in rows["kill and resume"]["text"], said
    assert rows["kill and resume"]["text"].endswith("equal to the last bit"), said
    # A host without shared memory, and a link that is too slow.
    own_lab.output(BAD, "mount", "-o", "remount,size=100M", "/dev/shm")
    limit = ("tbf", "rate", "10mbit", "burst", "32k", "latency", "50ms")
    own_lab.output(BAD, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)
    try:
        code, rows, said = accept("bad", f"n1,{BAD}", "--", "--only=machine,bandwidth")
    finally:
        own_lab.output(BAD, "tc", "qdisc", "del", "dev", "eth0", "root")
    assert code == 1 and {row["state"] for row in rows.values()} == {"failed"}, said
    assert f"shared-memory on {BAD} (rank 1): " in rows["machine"]["text"], said
    assert "expected 2% at least with gloo" in rows["bandwidth"]["text"], said
