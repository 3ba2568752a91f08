"""Plant faults in runs of several nodes, one at a time, and check which cause `why` names.

`PYTHONPATH=. python tests/first_causes.py` plants them all and prints the table of
docs/reliability.md; `--every 10` plants every tenth. `--results FILE --count 30` plants 30 of those
whose answers are not in the file yet, so that they can be planted in parts. Each case starts a run
with `submit --local` and one rank per node or two, lets a process of it end or hang in some way,
and reads what `rollcall why` says. A right answer names the process or node that was at fault and
how it ended. A victim is a rank, or a node, that only lost another one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollcall.records.files import append_line, read_lines
from rollcall.run_dir import RunDir

ROOT = Path(__file__).parents[1]
SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
NODES = 3
LIMIT = 120
"""Seconds until a case is given up."""
SCRIPT = """
import os, signal, socket, sys, time

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
culprit, how, when = int(sys.argv[1]), sys.argv[2], sys.argv[3]
port = int(os.environ["MASTER_PORT"]) + 1


def fault():
    if how == "exit 0":
        sys.exit(0)
    if how == "returns":
        raise EndEarly
    if how == "os._exit 0":
        os._exit(0)
    if how == "exit 1":
        sys.exit(1)
    if how == "exit 2":
        sys.exit(2)
    if how == "exit 3":
        os._exit(3)
    if how == "message":
        sys.exit("no such option")
    if how.startswith("signal "):
        os.kill(os.getpid(), getattr(signal, how.split()[1]))
    if how == "hang":
        time.sleep(1000)
    if how == "memory":
        raise MemoryError("cannot allocate 8 GiB")
    if how == "import":
        import a_module_that_nobody_has
    if how == "data":
        raise ConnectionRefusedError("[Errno 111] Connection refused: the data server")
    raise ValueError("a bad sample")


class EndEarly(Exception):
    pass


def receive(peer, count):
    text = b""
    while len(text) < count:
        part = peer.recv(count - len(text))
        if not part:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
        text += part


class Ring:
    # as a collective: every rank waits for all others, and fails if one has gone
    def __init__(self):
        self.peers = []
        if rank == 0:
            server = socket.create_server(("127.0.0.1", port))
            self.peers = [server.accept()[0] for _ in range(world - 1)]
        else:
            end = time.monotonic() + 60
            while not self.peers:
                try:
                    self.peers = [socket.create_connection(("127.0.0.1", port))]
                except ConnectionRefusedError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.02)
        for peer in self.peers:
            peer.settimeout(6 if how == "hang" else 60)

    def meet(self):
        try:
            if rank == 0:
                for peer in self.peers:
                    receive(peer, 1)
                for peer in self.peers:
                    peer.sendall(b"x")
            else:
                self.peers[0].sendall(b"x")
                receive(self.peers[0], 1)
        except TimeoutError:
            raise RuntimeError("Timed out waiting 6000ms for recv operation to complete") from None
        except OSError:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:5] Connection reset by peer") from None


def main():
    if when == "import" and rank == culprit:
        fault()
    ring = Ring()
    ring.meet()
    if when == "start" and rank == culprit:
        fault()
    for step in range(2000):
        ring.meet()
        print("step", step, flush=True)
        time.sleep(0.01)
        if rank == culprit and when == "middle" and step == 20:
            fault()


try:
    main()
except EndEarly:
    pass
"""


@dataclass(frozen=True)
class Case:
    """A fault: in a process of a kind, of a node or with a rank, in some way, at some time."""

    who: str  # rank, agent, fork server, supervisor
    how: str
    when: str  # import, start or middle
    node: int
    per_node: int = 1
    words: tuple[str, ...] = ()  # further ones for submit
    trains: bool = False

    def __str__(self) -> str:
        place = f"node {self.node}, {self.per_node} per node"
        return " ".join([self.who, self.how, f"({self.when}, {place})", *self.words])

    @property
    def rank(self) -> int:
        """The rank at fault; the last one of its node."""
        return self.node * self.per_node + self.per_node - 1


BY_THEMSELVES = {
    "exit 0": "ended with exit code 0",
    "returns": "ended with exit code 0",
    "os._exit 0": "ended with exit code 0",
    "exit 1": "ended with exit code 1",
    "exit 2": r"refused the request \(exit code 2\)",
    "exit 3": "ended with exit code 3",
    "message": "raised no such option",
    "exception": "raised ValueError: a bad sample",
    "memory": "raised MemoryError",
    "import": "raised ModuleNotFoundError",
    "data": "raised ConnectionRefusedError",
    "signal SIGKILL": "was ended by SIGKILL",
    "signal SIGSEGV": "was ended by SIGSEGV",
    "signal SIGABRT": "was ended by SIGABRT",
    "signal SIGTERM": "was ended by SIGTERM",
    "signal SIGBUS": "was ended by SIGBUS",
    "hang": "did not reach",
    "stopped": r"was stopped, as by SIGSTOP",
}
"""What the explanation says of a rank, by how it ended."""
FROM_OUTSIDE = {
    ("agent", "SIGKILL"): r"the parent of the ranks on node {node} .* was ended by SIGKILL",
    ("agent", "SIGSEGV"): r"the parent of the ranks on node {node} .* was ended by SIGSEGV",
    ("agent", "SIGSTOP"): r"\(node {node}\) the parent of the ranks was stopped",
    ("fork server", "SIGKILL"): r"the parent of the ranks on node {node} .* was ended by SIGKILL",
    ("fork server", "SIGSTOP"): r"\(node {node}\) the parent of the ranks was stopped",
    ("supervisor", "SIGKILL"): r"nothing more was heard of node {node} ",
    ("supervisor", "SIGSEGV"): r"nothing more was heard of node {node} ",
    ("supervisor", "SIGSTOP"): r"nothing more was heard of node {node} ",
    ("supervisor", "SIGTERM"): r"node {node} .* was asked to stop by SIGTERM",
    ("supervisor", "SIGINT"): r"node {node} .* was asked to stop by SIGINT",
}
"""What the explanation says, by the process of a node and the signal that it gets."""


def cases() -> list[Case]:
    """Return all faults."""
    found = []
    for how in BY_THEMSELVES:
        if how == "stopped":
            continue
        for node in range(NODES):
            for when in ("start", "middle"):
                found.append(Case("rank", how, when, node, 1 + (node + len(how)) % 2))
    found += [
        Case("rank", how, "import", node) for how in ("exception", "import") for node in (0, 2)
    ]
    found += [
        Case("rank", "stopped", "middle", node, per) for node in range(NODES) for per in (1, 2)
    ]
    for (who, how), _ in FROM_OUTSIDE.items():
        found += [Case(who, how, "middle", node, 1 + node % 2) for node in range(NODES)]
    for how in ("exit 0", "exception", "signal SIGKILL", "exit 3"):
        more = ("--start-method", "torchrun")
        found += [Case("rank", how, "middle", node, 2, more) for node in (0, 2)]
    for how in ("exit 0", "exception", "signal SIGKILL"):
        found += [Case("rank", how, "middle", node, 1, ("--max-restarts", "1")) for node in (0, 1)]
    found += [
        Case("supervisor", "SIGKILL", "middle", node, 1, ("--max-restarts", "1")) for node in (1, 2)
    ]
    return found


def plant(case: Case, place: Path) -> str:
    """Run a case in its own directory; return what `why` says first, with its consequences."""
    place.mkdir(parents=True)
    (place / "script.py").write_text(SCRIPT)
    own = case.who == "rank" and case.how != "stopped"
    words = [str(case.rank), case.how, case.when] if own else ["-1", "", ""]
    options = ["--local", f"--nodes={NODES}", f"--nproc-per-node={case.per_node}", "--name=it"]
    process = subprocess.Popen(
        [*SUBMIT, *options, "--wait", *case.words, "--", "script.py", *words],
        cwd=place,
        stdout=(place / "output").open("w"),
        stderr=subprocess.STDOUT,
    )
    run = RunDir(place / "runs", "it")
    try:
        if not own:
            _hit(case, run, process)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the answer is then wrong, too
            process.wait(LIMIT)
    finally:
        for child in _family(process.pid):
            child.kill()
        process.wait()
    why = [sys.executable, "-m", "launch", "why", "it", "--root", str(place / "runs")]
    said = subprocess.run(why, cwd=ROOT, capture_output=True, text=True, check=False)
    return said.stdout or said.stderr


def is_right(case: Case, said: str) -> bool:
    """Whether the first line names the culprit and how it ended."""
    return re.search(_expected(case), said.partition("\n")[0]) is not None


def names_victim(case: Case, said: str) -> bool:
    """Whether the first line names another rank or node as the cause."""
    first = said.partition(": ")[2].partition("\n")[0]
    ranks = {int(number) for number in re.findall(r"\brank (\d+) on", first)}
    nodes = {int(number) for number in re.findall(r"\bnode (\d+)\b", first)}
    return bool(ranks - {case.rank}) or bool(nodes - {case.node})


def _expected(case: Case) -> str:
    if case.who == "rank":
        who = rf"rank {case.rank} " + (
            "" if case.how == "stopped" else rf"on .*\(node {case.node}\) "
        )
        return who + BY_THEMSELVES[case.how]
    return FROM_OUTSIDE[case.who, case.how].format(node=case.node)


def _hit(case: Case, run: RunDir, process: subprocess.Popen[bytes]) -> None:
    """Send a signal to a process of a node once the ranks make steps."""
    end = time.monotonic() + LIMIT
    logs = [
        run.log(0, node, node * case.per_node + rank)
        for node in range(NODES)
        for rank in range(case.per_node)
    ]
    while not all(log.exists() and "step 10" in log.read_text() for log in logs):
        if time.monotonic() > end or process.poll() is not None:
            return
        time.sleep(0.1)
    number = signal.SIGSTOP if case.how == "stopped" else getattr(signal, case.how)
    os.kill(_process(case, run), number)


def _process(case: Case, run: RunDir) -> int:
    supervisor = int(next(iter(re.findall(r'"supervisor": (\d+)', _part(run, case.node)))))
    server = psutil.Process(supervisor).children()[0]
    (agent,) = server.children()
    chain = {"supervisor": supervisor, "fork server": server.pid, "agent": agent.pid}
    if case.who in chain:
        return chain[case.who]
    logs = {str(run.log(0, case.node, case.rank))}
    pids = [child.pid for child in agent.children()]
    return next(pid for pid in pids if str(Path(f"/proc/{pid}/fd/1").readlink()) in logs)


def _part(run: RunDir, node: int) -> str:
    return (run.job / "attempt-0" / f"node-{node}.json").read_text()


def _family(pid: int) -> Iterator[psutil.Process]:
    try:
        process = psutil.Process(pid)
        yield from [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return


def table(results: list[tuple[Case, str]]) -> str:
    """Return the score as a table in Markdown: right of all, by who and how."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for case, said in results:
        count = counts.setdefault(_row(case), Counter())
        count["all"] += 1
        count["right"] += is_right(case, said)
        count["victim"] += names_victim(case, said)
    names = "process at fault", "how it ended", "planted", "right", "a victim named"
    rows = [f"| {' | '.join(names)} |", "| --- " * 5 + "|"]
    total = sum(counts.values(), Counter())
    for (who, how), count in [*counts.items(), (("all", ""), total)]:
        rows.append(f"| {who} | {how} | {count['all']} | {count['right']} | {count['victim']} |")
    return "\n".join(rows)


def _row(case: Case) -> tuple[str, str]:
    if case.who != "rank":
        parent = case.who in ("agent", "fork server")
        return "parent of the ranks" if parent else case.who, "a signal"
    if case.how in ("exit 0", "returns", "os._exit 0"):
        return "rank", "exit code 0, or it returned"
    if case.how.startswith("exit") or case.how == "message":
        return "rank", "exit code 1, 2 or 3, or a message"
    if case.how.startswith("signal"):
        return "rank", "SIGKILL, SIGSEGV, SIGABRT, SIGTERM, SIGBUS"
    return "rank", "hang, or SIGSTOP" if case.how in ("hang", "stopped") else "exception"


def main() -> int:
    """Plant the faults and print the table; the exit code is 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="plant every Nth fault only")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help="plant those whose description has this text")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--results", type=Path, help="keep the answers here, and use those there")
    parser.add_argument("--count", type=int, help="plant at most this many faults")
    options = parser.parse_args()
    chosen = [case for case in cases()[options.first :: options.every] if options.only in str(case)]
    known = {line["case"]: line["said"] for line in read_lines(options.results or Path(os.devnull))}
    left = [case for case in chosen if str(case) not in known][: options.count]
    place = Path(tempfile.mkdtemp(prefix="causes-"))  # kept if an answer was wrong
    with ThreadPoolExecutor(options.at_once) as pool:
        places = [place / str(number) for number in range(len(left))]
        for case, where, said in zip(left, places, pool.map(plant, left, places), strict=True):
            known[str(case)] = said
            if options.results:
                append_line(options.results, {"case": str(case), "said": said})
            if is_right(case, said):
                shutil.rmtree(where)
            else:
                print(f"WRONG {case}, in {where}:\n{said}", file=sys.stderr, flush=True)
    results = [(case, known[str(case)]) for case in chosen if str(case) in known]
    print(table(results))
    return 0 if all(is_right(case, said) for case, said in results) else 1


if __name__ == "__main__":
    sys.exit(main())
