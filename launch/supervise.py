"""`python -m launch supervise -- -m train digits`: the process that runs once on every node.

It finds out which node this is, meets the other nodes in the run directory, starts this node's
ranks through train.agent, passes signals on to them, and ends them when another node has failed. It
is the same from submit.py, from a plain sbatch template and on one machine.

Exit code: 0 done, 75 stopped in order (start it again to continue), anything else failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import node as nodes
from launch import processes, which
from launch.comment import Comment
from launch.follow import Output
from launch.job import RANKS_WITHOUT_GPU
from launch.node import Node, NodeError
from launch.processes import REQUESTS, Request
from launch.rendezvous import (
    DEADLINE,
    Meeting,
    Rendezvous,
    RendezvousError,
    attempt_directory,
    route,
)
from launch.stamps import Stamps
from train.hosts import HostError
from train.run import RunDir, State, Verdict, append_line, write_atomic

TICK = 0.25
"""Seconds between two looks at the log and the agent."""
PEER_CHECK = 1.0
"""Seconds between two looks at whether another node has failed."""
STOP_GRACE = 600.0
"""Seconds that ranks have to save and leave when asked to stop; Slurm's own limits come first."""
FAILURE_GRACE = 5.0
"""Seconds that ranks have to notice and say that another node has failed."""

GUEST_VERDICTS: dict[str, State] = {"finished": "done", "stopped": "stopped", "failed": "failed"}
"""What the head writes for a program of the user's own, which writes no verdict."""


class Supervisor:
    """This node's part of one attempt, from the rendezvous to the exit code."""

    def __init__(self, run: RunDir, node: Node, ranks: int) -> None:
        self.run = run
        self.node = node
        self.ranks = ranks
        self.meeting = Meeting(run, node)
        self.requests: list[Request] = []
        self.kill_at: float | None = None
        self.peer_failure: str | None = None
        self._peer_check = 0.0

    def meet(self) -> tuple[Rendezvous, socket.socket | None] | None:
        """Agree with the other nodes on where to meet; None if asked to stop meanwhile.

        Raises:
            HostError, RendezvousError: the nodes cannot meet.
        """
        if self.node.is_head:
            self.run.forget_verdict()
            return self.meeting.publish(self.ranks)
        end = time.monotonic() + DEADLINE
        while (found := self.meeting.read(self.ranks)) is None:
            if self._listen(0.1):
                return None
            self.peer_failure = self.meeting.failure()
            if self.peer_failure:
                raise RendezvousError(self.peer_failure)
            if time.monotonic() > end:
                raise self.meeting.silence()
        return found, None

    def start(
        self,
        rendezvous: Rendezvous,
        holder: socket.socket | None,
        start_method: str,
        program: Sequence[str],
    ) -> subprocess.Popen[bytes]:
        """Start the agent, which starts the ranks."""
        world_size = self.node.count * self.ranks
        log = self.run.log(rendezvous.attempt, self.node.number, 0)
        command = [sys.executable, "-m", "train.agent"]
        command += [f"--nnodes={self.node.count}", f"--node-rank={self.node.number}"]
        command += [f"--nproc-per-node={self.ranks}", f"--expect-world={world_size}"]
        command += [f"--master-addr={rendezvous.address}", f"--master-port={rendezvous.port}"]
        command += [f"--run-id={self.node.key}", f"--log-dir={log.parent}"]
        command += [f"--start-method={start_method}"]
        if holder is not None:
            command += [f"--port-fd={holder.fileno()}"]
        interface = route(self.node, rendezvous.address).interface
        env = {
            "GLOO_SOCKET_IFNAME": interface,
            # "=" for exactly this one; NCCL shuns lo by itself and needs no address on one node
            **({"NCCL_SOCKET_IFNAME": f"={interface}"} if interface != "lo" else {}),
            **os.environ,
            "ROLLCALL_WORLD_SIZE": str(world_size),
        }
        if self.node.gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = self.node.gpus
        return subprocess.Popen(
            [*command, *program],
            env=env,
            pass_fds=[holder.fileno()] if holder else [],
            start_new_session=True,  # a Ctrl-C reaches the ranks once: through us
            preexec_fn=processes.become_agent,
        )

    def follow(self, agent: subprocess.Popen[bytes], log: Path) -> int:
        """Look after the ranks until the agent ends; return its exit code, 128 + n for signal n."""
        stamps, comment = Stamps(log.parent), Comment(self.run, self.node)
        output = Output([log] if self.node.is_head else [])
        while agent.poll() is None:
            self._listen(TICK)
            output.show()
            stamps.look()
            comment.update()
            self._look_at_peers()
            if self.requests:
                ranks = processes.children(agent.pid)
                for request in self.requests:
                    request.deliver(ranks)
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
        processes.end_orphans()
        output.show()
        stamps.look(at_once=True)
        return agent.returncode if agent.returncode >= 0 else 128 - agent.returncode

    def _listen(self, timeout: float) -> bool:
        """Wait for a signal; note it if it asks to stop."""
        info = signal.sigtimedwait([*REQUESTS, signal.SIGCHLD], timeout)
        if info is None or info.si_signo == signal.SIGCHLD:
            return False
        # Slurm repeats signals; only a person's second Ctrl-C means more than the first.
        known = {request.number for request in self.requests}
        if info.si_signo == signal.SIGINT or info.si_signo not in known:
            self.requests.append(Request(info.si_signo))
        self.kill_at = self.kill_at or time.monotonic() + STOP_GRACE
        return True

    def _look_at_peers(self) -> None:
        now = time.monotonic()
        if self.peer_failure or now < self._peer_check:
            return
        self._peer_check = now + PEER_CHECK
        self.peer_failure = self.meeting.failure()
        if self.peer_failure:
            self.kill_at = min(self.kill_at or now + FAILURE_GRACE, now + FAILURE_GRACE)


def main(argv: Sequence[str]) -> int:
    """Run this node's part of a run; return the exit code."""
    # Blocked, not handled: no signal is lost from here on, and each is taken when it can be used.
    signal.pthread_sigmask(signal.SIG_BLOCK, [*REQUESTS, signal.SIGCHLD])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the run outlives the terminal
    processes.adopt_orphans()
    options = _parser().parse_args(argv)
    program = options.program[options.program[:1] == ["--"] :]
    if not program:
        return _fail("no program: add -- -m train, or -- script.py")
    if options.run_dir is not None and "SLURM_ARRAY_TASK_ID" in os.environ:
        task = int(os.environ["SLURM_ARRAY_TASK_ID"])
        options.run_dir, words = which.array_task(options.run_dir, options.cells, task)
        program += words
    try:
        node = nodes.find(os.environ)
        run = which.run_directory(options.run_dir, program, node)
    except (NodeError, ValueError) as error:
        return _fail(str(error))
    try:
        return _supervise(options, program, run, node)
    except (HostError, RendezvousError, OSError) as error:
        # OSError: the run directory went away or is full; the others must not wait for this node.
        with contextlib.suppress(OSError):
            Meeting(run, node).fail(str(error))
        return _fail(f"node {node.number} ({node.host}): {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch supervise", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, help="default: runs/<recipe or script>-<job id>")
    parser.add_argument("--cells", type=Path, help="what the tasks of an array run, from a sweep")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        help="ranks on every node (default: one per GPU, and "
        f"{RANKS_WITHOUT_GPU} where there is none)",
    )
    parser.add_argument("--start-method", choices=("fork", "torchrun"), default="fork")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="-m train digits …"
    )
    return parser


def _supervise(options: argparse.Namespace, program: Sequence[str], run: RunDir, node: Node) -> int:
    verdict = run.read_verdict()
    if options.run_dir is not None and verdict is not None and verdict.state == "done":
        print(f"run {run.name} is finished: {verdict.reason}")  # a later job of a chain
        return 0
    run.create()
    supervisor = Supervisor(run, node, options.nproc_per_node or node.default_ranks)
    met = supervisor.meet()
    if met is None:
        return os.EX_TEMPFAIL
    rendezvous, holder = met
    attempt = {"attempt": rendezvous.attempt, "job": node.job}
    state_file = attempt_directory(run, rendezvous.attempt) / f"node-{node.number}.json"
    started = {"node": node.number, "host": node.host, "started": time.time()}
    write_atomic(state_file, json.dumps({**started, "state": "running"}) + "\n")
    if node.is_head:
        _note(run, attempt, "started", hosts=node.hosts, ranks=node.count * supervisor.ranks)
    if list(program[:2]) == ["-m", "train"]:
        program = [*program, f"run.name={run.name}", f"run.root={run.path.parent}"]
    agent = supervisor.start(rendezvous, holder, options.start_method, program)
    if holder is not None:
        holder.close()  # the agent has it now
    log = run.log(rendezvous.attempt, node.number, node.number * supervisor.ranks)
    state, code = _outcome(supervisor.follow(agent, log), run.read_verdict())
    if node.is_head and list(program[:2]) == ["-m", "launch.guest"]:
        run.conclude(Verdict(GUEST_VERDICTS[state], 0, f"the program ended with exit code {code}"))
    if supervisor.peer_failure and state == "failed":
        print(f"node {node.number} ({node.host}) ends: {supervisor.peer_failure}", file=sys.stderr)
    elif state == "failed":
        supervisor.meeting.fail(f"its ranks ended with exit code {code}")
    ended = {**started, "ended": time.time(), "state": state, "exit_code": code}
    write_atomic(state_file, json.dumps(ended) + "\n")
    if node.is_head:
        _note(run, attempt, "ended", state=state, exit_code=code)
    return code


def _outcome(code: int, verdict: Verdict | None) -> tuple[str, int]:
    """The state and exit code of this node's part.

    torch's agent makes every failure 1, so the verdict of rank 0 counts where there is one.
    """
    if verdict is not None and verdict.state == "done":
        return "finished", 0
    if code == os.EX_TEMPFAIL or (verdict and verdict.state in ("requeue", "stopped")):
        return "stopped", os.EX_TEMPFAIL
    if code == 0 and verdict is None:  # a program of the user's own, which writes none
        return "finished", 0
    return "failed", code or 1


def _note(run: RunDir, attempt: dict[str, Any], event: str, **fields: Any) -> None:
    append_line(
        run.job / "attempts.jsonl", {**attempt, "event": event, "time": time.time(), **fields}
    )


def _fail(message: str) -> int:
    print(f"supervise: error: {message}", file=sys.stderr)
    return 2
