"""Plant faults in runs of several nodes, one at a time, and check which cause `why` names.

`PYTHONPATH=.:tests/helpers python tests/campaigns/first_causes.py` plants them all and prints the
table of docs/reliability.md; `--every 10` plants every tenth. `--results FILE --count 30` plants
30 of those whose answers are not in the file yet, so that they can be planted in parts. Each case
starts a run with `submit --local` and one rank per node or two, lets a process of it end or hang
in some way, and reads what `rollcall why` says. A right answer names the process or node that was
at fault and how it ended. A victim is a rank, or a node, that only lost another one.
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
from checkout import ROOT

from rollcall.records.job import Restart
from rollcall.records.run_dir import RunDir
from rollcall.system.files import append_line, read_lines

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
NODES = 3
LIMIT = 240
"""Seconds until a case is given up."""
SCRIPT = """
import os, signal, socket, sys, threading, time

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
culprit, how, when = int(sys.argv[1]), sys.argv[2], sys.argv[3]
port = int(os.environ["MASTER_PORT"]) + 1


def fault():
    word, _, code = how.partition(" ")
    if word == "exit":
        sys.exit(int(code))
    if word == "os._exit":
        os._exit(int(code))
    if how == "returns":
        raise EndEarly
    if how == "threads":
        raise RuntimeError("can't start new thread")
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
"""
RING = """

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

IN_TRAINING = """
import multiprocessing, os, signal, sys, threading, time

import torch
from torch.utils.data import Dataset

from rollcall.train.data.source import Source

def is_due(once, step):
    try:
        return not once or os.close(os.open(f"{once}-{step}", os.O_CREAT | os.O_EXCL)) is None
    except FileExistsError:
        return False

def fault(how):
    word, _, code = how.partition(" ")
    if word == "exit":
        sys.exit(int(code))
    if word == "os._exit":
        os._exit(int(code))
    if word == "signal":
        os.kill(os.getpid(), getattr(signal, code))
    if how == "hang":
        time.sleep(1000)
    if how == "spin":
        while True:
            pass
    if how == "locked":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if how == "threads":
        raise RuntimeError("can't start new thread")
    if how == "message":
        sys.exit("no such option")
    raise ValueError("a bad sample")

class Fault:
    def __init__(self, run, model, rank: int, how: str, steps: str, once: str):
        self.is_here, self.how, self.once = run.world.rank == rank, how, once
        self.steps = [int(step) for step in steps.split("-")[1:]]

    def settle(self, step, agreed):
        if self.is_here and step.number in self.steps and is_due(self.once, step.number):
            fault(self.how)

class EachTime(Fault):
    # with a state, so that the others cannot save the step at which this rank is at fault
    def state_dict(self):
        return {"state": 0}

    def load_state_dict(self, state):
        pass

class KillsWriter(Fault):
    is_set = False

    def settle(self, step, agreed):
        if self.is_here and step.number > 5 and not self.is_set:
            self.is_set = True
            os.register_at_fork(after_in_child=self.die)  # it forks only to save

    def die(self):
        if is_due(self.once, "save"):
            os.kill(os.getpid(), signal.SIGKILL)

class Data(Dataset):
    read = 0

    def __len__(self):
        return 960

    def __getitem__(self, row):
        if os.environ["RANK"] == os.environ["CULPRIT"] and multiprocessing.parent_process():
            self.read += 1
            if self.read == 10 and is_due(os.environ["ONCE"], 0):
                fault(os.environ["HOW"])
        return torch.zeros(1, 8, 8), row % 10

def data(config, world):
    return Source(Data(), Data(), 960, 96, (1, 8, 8), 10)
"""
WORDS = (
    *("digits", "device=cpu", "train.steps=60", "log.every=1", "checkpoint.every=20"),
    *("data.global_batch=96", "faults.hang_seconds=6", "train.callbacks=fx:Fault"),
)
"""The words of a training in which a callback of one rank is at fault."""
STEPS = {"start": (1,), "middle": (25,), "often": (25, 45), "saved": (20,)}
"""The steps at which a rank of a training is at fault, by the name of the moment."""


@dataclass(frozen=True)
class Case:
    """A fault: in a process of a kind, of a node or with a rank, in some way, at some time."""

    who: str  # rank, agent, fork server, supervisor; in a training also data worker, writer
    how: str
    when: str  # import, start or middle
    node: int
    per_node: int = 1
    words: tuple[str, ...] = ()  # further ones for submit
    trains: bool = False  # a training instead of a script
    once: bool = False  # of a training: only in the first attempt that gets there

    def __str__(self) -> str:
        place = f"node {self.node}, {self.per_node} per node"
        kind = ["in a training", *(["once"] if self.once else [])] if self.trains else []
        return " ".join([self.who, self.how, f"({self.when}, {place})", *self.words, *kind])

    @property
    def rank(self) -> int:
        """The rank at fault; the last one of its node."""
        return self.node * self.per_node + self.per_node - 1


CODES = (0, 1, 64, 69, 75, 77, 78, 120, 126, 127, 128, 129, 137, 139, 143, 254, 255)
BY_THEMSELVES = {
    **{f"exit {code}": f"ended with exit code {code}" for code in (0, 1, 3, 75, 130)},
    **{f"os._exit {code}": f"ended with exit code {code}" for code in CODES},
    "exit 2": r"refused the request \(exit code 2\)",
    "os._exit 2": r"refused the request \(exit code 2\)",
    "returns": "ended with exit code 0",
    "threads": "raised RuntimeError: can't start new thread",
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
    "signal SIGHUP": "was ended by SIGHUP",
    "signal SIGXCPU": "was ended by SIGXCPU",
    "hang": "did not reach",
    "stopped": r"was stopped, as by SIGSTOP",
}
"""What the explanation says of a rank, by how it ended."""
ENDS_AT_ONCE = ("os._exit 2", "exception")
"""Ends of a rank that every attempt would meet, if they come before a training's first step."""
FROM_OUTSIDE = {
    ("agent", "SIGKILL"): r"the parent of the ranks on node {node} .* was ended by SIGKILL",
    ("agent", "SIGSEGV"): r"the parent of the ranks on node {node} .* was ended by SIGSEGV",
    ("agent", "SIGSTOP"): r"\(node {node}\) the parent of the ranks was stopped",
    ("fork server", "SIGKILL"): r"the parent of the ranks on node {node} .* was ended by SIGKILL",
    ("fork server", "SIGSTOP"): r"\(node {node}\) the parent of the ranks was stopped",
    ("supervisor", "SIGKILL"): r"nothing more was heard of node {node} ",
    ("supervisor", "SIGSEGV"): r"nothing more was heard of node {node} ",
    ("supervisor", "SIGSTOP"): r"has not failed: done",  # the parent of its ranks wakes it
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
    return found + in_trainings()


def in_trainings() -> list[Case]:
    """Return the faults in trainings, which start again."""
    hows = [how for how in BY_THEMSELVES if how.startswith(("os._exit", "exit", "signal"))]
    for how in ("signal SIGTERM", "signal SIGHUP"):  # at which a training saves and stops
        hows.remove(how)
    hows += ["hang", "spin", "locked", "threads", "message", "exception"]
    found = []
    for number, how in enumerate(hows):
        whens = [("start", "middle", "saved")[number % 3], "often"]
        for place, when in enumerate(whens):
            node, per = (number + place) % 2, 1 + (number + place) // 2 % 2
            found.append(
                Case("rank", how, when, node, per, trains=True, once=when in ("often", "saved"))
            )
    for place, how in enumerate(("os._exit 0", "os._exit 75", "signal SIGKILL", "signal SIGSEGV")):
        node, per = place % 2, 1 + place // 2
        found += [
            Case("data worker", how, "middle", node, per, trains=True, once=once)
            for once in (False, True)
        ]
    return [
        *found,
        Case("data worker", "hang", "middle", 1, 2, trains=True),
        Case("data worker", "exception", "middle", 1, 1, trains=True),
        *(Case("writer", "signal SIGKILL", "saved", node, 1, (), True, True) for node in (0, 1)),
    ]


@dataclass(frozen=True)
class Answer:
    """What was said of a fault: while the run went on, in its records, and when it was over."""

    why: str  # what `why` says first, with its consequences
    printed: list[str]  # the sentences about the first cause, one for each restart or end
    restarts: list[str]  # the reasons in restarts.jsonl
    verdict: str
    state: str
    code: int | None  # of `submit --wait`; None if it did not end
    logs: str = ""  # the output of all ranks


def plant(case: Case, place: Path) -> str:
    """Run a case in its own directory; return what `why` says first, with its consequences."""
    return answer(case, place).why


def answer(case: Case, place: Path) -> Answer:
    """Run a case in its own directory; return all that was said of it."""
    place.mkdir(parents=True)
    (place / "script.py").write_text(SCRIPT + RING)
    (place / "fx.py").write_text(IN_TRAINING)
    own = case.who == "rank" and case.how != "stopped"
    words = [str(case.rank), case.how, case.when] if own else ["-1", "", ""]
    program = ["--", "script.py", *words]
    nodes = 2 if case.trains else NODES
    if case.trains:
        steps = "-".join(["at", *map(str, STEPS[case.when])])
        given = {"rank": case.rank, "how": case.how, "steps": steps}
        given["once"] = place / "was" if case.once else "''"
        name = "Fault" if case.once else "EachTime"
        name = "KillsWriter" if case.who == "writer" else name
        words = [word.replace("fx:Fault", f"fx:{name}") for word in WORDS]
        program = [*words, *(f"train.callbacks.{name}.args.{key}={given[key]}" for key in given)]
        if case.who == "data worker":
            program = [*(w for w in words if "fx:" not in w), "data.name=fx:data"]
            program += ["data.num_workers=1"]
            program[0] = "model.name=mlp"
    options = ["--local", f"--nodes={nodes}", f"--nproc-per-node={case.per_node}", "--name=it"]
    process = subprocess.Popen(
        [*SUBMIT, *options, "--wait", *case.words, *program],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place), **_environment(case, place)},
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
    verdict, code = run.read_verdict(), process.returncode
    return Answer(
        said.stdout or said.stderr,
        re.findall(r"^rollcall: ((?:rank \d+ on|hang after|on ).*)", _text(place), re.MULTILINE),
        [line.reason for line in Restart.read(run.path)],
        verdict.reason if verdict else "",
        verdict.state if verdict else "",
        code if code >= 0 else None,
        "".join(log.read_text(errors="replace") for log in run.logs.glob("*/*/rank-*.log")),
    )


def _environment(case: Case, place: Path) -> dict[str, str]:
    once = str(place / "was") if case.once else ""
    return {"CULPRIT": str(case.rank), "HOW": case.how, "ONCE": once}


def _text(place: Path) -> str:
    return (place / "output").read_text(errors="replace")


def is_right(case: Case, said: str) -> bool:
    """Whether the first line names the culprit and how it ended."""
    return re.search(_expected(case), said.partition("\n")[0]) is not None


def problems(case: Case, answer: Answer) -> list[str]:
    """Return what is wrong in what was said of a fault."""
    right = re.compile(_expected(case))
    if not case.trains:
        found = [] if is_right(case, answer.why) else [f"why: {answer.why}"]
        if (case.who, case.how) == ("supervisor", "SIGSTOP"):
            return [*found, f"exit code {answer.code}"] if answer.code != 0 else found
        if case.how not in ("SIGTERM", "SIGINT"):  # of a supervisor, at which the run stops
            found += [f"printed: {text}" for text in answer.printed if not right.search(text)]
            is_untold = (case.who, case.node) == ("supervisor", 0)  # the head writes the verdict
            is_right_verdict = is_untold or right.search(answer.verdict)
            if answer.code in (0, 75, None) or not is_right_verdict:
                found.append(f"exit code {answer.code}, verdict: {answer.verdict}")
        return found
    if case.once and case.who != "rank":  # which the run survives without a restart
        survived = (answer.state, answer.code, len(answer.restarts))
        found = [] if survived == ("done", 0, 0) else [f"state, exit code, restarts: {survived}"]
        return found if right.search(answer.logs) else [*found, "nobody names it"]
    stops = case.when == "start" and case.how in ENDS_AT_ONCE
    found = [f"printed: {text}" for text in answer.printed if not right.search(text)]
    found += [f"restart: {text}" for text in answer.restarts if not right.search(text)]
    if case.once:
        count = len(STEPS[case.when])
        ended = (answer.state, answer.code, len(answer.restarts), len(answer.printed) >= count)
        if ended != ("done", 0, count, True):
            found.append(f"state, exit code, restarts: {ended}")
        if f"{count} times" not in answer.why and "once" not in answer.why:
            found.append(f"why: {answer.why}")
        return found
    expected_restarts = 0 if stops else 2
    if (answer.state, len(answer.restarts)) != ("failed", expected_restarts):
        found.append(f"state, restarts: {answer.state}, {len(answer.restarts)}")
    if answer.code in (0, 75, None) or not answer.printed:
        found.append(f"exit code {answer.code}, printed {answer.printed}")
    if not right.search(answer.verdict):
        found.append(f"verdict: {answer.verdict}")
    return found if is_right(case, answer.why) else [*found, f"why: {answer.why}"]


def names_victim(case: Case, said: str) -> bool:
    """Whether the first line names another rank or node as the cause."""
    first = said.partition(": ")[2].partition("\n")[0]
    ranks = {int(number) for number in re.findall(r"\brank (\d+) on", first)}
    nodes = {int(number) for number in re.findall(r"\bnode (\d+)\b", first)}
    return bool(ranks - {case.rank}) or bool(nodes - {case.node})


def _expected(case: Case) -> str:
    if case.who == "writer":
        return rf"step 20 was not saved: the writing process of rank {case.rank} died .*: 9\)"
    if case.who == "data worker" and case.how == "exception":
        return rf"rank {case.rank} on .* cannot read sample .*ValueError: a bad sample"
    if case.who == "data worker" and case.how != "hang":
        word, _, code = case.how.partition(" ")
        how = f"exited with code {code}" if word == "os._exit" else f"was killed by {code}"
        where = "; restarted" if case.once else ", 3 times"
        return rf"data worker 0 of rank {case.rank} \(pid \d+\) {how}{where}"
    if case.trains and case.how in ("hang", "spin", "locked"):
        return rf"hang after step \d+, .*: rank {case.rank} on .* did not reach the collective"
    if case.trains and (case.how == "message" or case.how.startswith("exit")):
        code = "'no such option'" if case.how == "message" else case.how.split()[1]
        rank = rf"rank {case.rank} on .*\(node {case.node}\)"
        return rf"{rank} raised RuntimeError: .* called sys.exit\({code}\)"
    if case.trains and case.how == "os._exit 2" and case.when != "start":
        return rf"rank {case.rank} on .*\(node {case.node}\) ended with exit code 2"
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
    if case.how.startswith(("exit", "os._exit")) or case.how == "message":
        return "rank", "exit code 1, 2, 3 or another one, or a message"
    if case.how.startswith("signal"):
        return "rank", "SIGKILL, SIGSEGV, SIGABRT, SIGTERM, SIGBUS, SIGHUP, SIGXCPU"
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
    wrong = 0
    with ThreadPoolExecutor(options.at_once) as pool:
        places = [place / str(number) for number in range(len(left))]
        for case, where, told in zip(left, places, pool.map(answer, left, places), strict=True):
            known[str(case)] = told.why
            bad = problems(case, told)
            if options.results:
                line = {"case": str(case), "said": told.why, "bad": bad}
                append_line(options.results, line)
            if bad:
                wrong += 1
                text = "\n".join(bad)
                print(f"WRONG {case}, in {where}:\n{text}", file=sys.stderr, flush=True)
            else:
                shutil.rmtree(where)
    results = [(case, known[str(case)]) for case in chosen if str(case) in known]
    print(table([(case, said) for case, said in results if not case.trains]))
    trained = sum(case.trains for case in left)
    print(f"{len(left) - wrong} of {len(left)} right now, {trained} of them in trainings")
    return int(wrong > 0 or not all(case.trains or is_right(case, said) for case, said in results))


if __name__ == "__main__":
    sys.exit(main())
