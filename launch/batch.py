"""`python -m launch batch srun …`: what the script of a job becomes, so that work comes back.

It starts the step, passes on what Slurm wants to tell it, and starts it again on the hosts that are
left when a supervisor or a host is lost. When the run is to go on later, it queues the job again as
the last thing: Slurm itself does so only after a preemption without grace time or the loss of a
node, and never for a job that has come to an exit code.

Exit code: that of the step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from launch import cluster, requeue, restarts, runs, slurm, spares, takeover, which
from launch.job import STOP_LEAD
from launch.node import job_of, start_of
from launch.options import span
from launch.rendezvous import lost_hosts
from launch.restarts import Cause
from launch.slurm import SlurmError, Standing
from launch.spares import Hosts
from launch.takeover import Pulse
from launch.widen import Widening
from train.config import ConfigError
from train.output import outlast_full_disks
from train.run import RunDir, Verdict

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""What srun sends on to the supervisors. They get SIGTERM from Slurm; srun would end them at it."""
TAKEN = (*PASSED_ON, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
LOOK = 1.0
"""Seconds between two looks at whether a host has been lost."""
LAST_CHANCE: dict[str, Cause] = {"TimeLimit": "time limit", "JobLaunchFailure": "lost node"}
"""Slurm's reasons for which a job that it ends comes back, and what that is to us. The second is
that of a script on a host that Slurm took for dead, and that was back: Slurm kills it then."""
LEAVE = 5.0
"""Seconds that the step has to end then."""
REFUSED = 2
"""Exit code of a supervisor whose request would be refused again."""
ABSENCE = 600.0
"""Seconds for which Slurm's controller may be away when the step has ended."""


def main(argv: Sequence[str]) -> int:
    """Run the step to its end, and queue the job again if it is to come back."""
    # Blocked, not handled: each is taken when it can be used.
    signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)
    outlast_full_disks()
    parser = argparse.ArgumentParser(prog="python -m launch batch", allow_abbrev=False)
    nodes = "on how many the job's step can run"
    parser.add_argument("--nodes", type=span, metavar="MIN-MAX", help=nodes)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="srun …")
    options = parser.parse_args(argv)
    if "SLURM_JOB_ID" not in os.environ or not options.command:
        print("batch: error: this is for a job's script: exec … batch srun …", file=sys.stderr)
        return 2
    try:
        return Batch(options, job_of(os.environ)).run_it()
    except OSError as error:  # there is no srun, or the run directory cannot be written
        print(f"batch: error: {error}", file=sys.stderr)
        return REFUSED


class Batch:
    """A job's first process, above its step.

    Args:
        options: the command line.
        job: the id of the job.
    """

    def __init__(self, options: argparse.Namespace, job: str) -> None:
        self.command: list[str] = options.command
        self.job = job
        self.run: RunDir | None = None
        self._options = options
        self._this_start = start_of(job, os.environ)
        self._own_step = takeover.leave_step(options.output) if options.number else None
        self._hosts = Hosts(self.command, os.environ, options.nodes)
        self._step: subprocess.Popen[bytes]
        self._pulse: Pulse | None = None
        self._widening: Widening | None = None
        self._lost: dict[str, str] = {}
        self._was_asked = False
        self._is_widening = False
        self._is_queued = False

    def run_it(self) -> int:
        """Look after the step, and start it again on the hosts that are left; its exit code."""
        try:
            self.run, is_named = which.of_step(self.command, os.environ, self.job)
        except ConfigError:
            return self._follow(self.command)  # the step says what is wrong
        except which.CommandError as error:
            print(f"batch: note: the job will not come back by itself: {error}", file=sys.stderr)
            return self._follow(self.command)
        if is_named and (text := which.finished(self.run)):
            print(text)
            return 0
        if self._hosts.may_change:
            nodes = ["--nodes={}-{}".format(*self._options.nodes)] if self._options.nodes else []
            words = [*nodes, *self.command]
            self._pulse = Pulse(self.run, self._this_start, self._options.number, words)
        if self._options.nodes:
            self._widening = Widening(self.run, self.job, self._hosts)
        if self._own_step is None:
            return self._go_on(self.run, self.command)
        code, hosts = os.EX_UNAVAILABLE, self._next_hosts(self.run)
        if hosts is not None:
            code = self._go_on(self.run, self._again_on(hosts))
        if not self._is_queued:
            # Slurm waits for the end of the script, which has died with its host.
            with contextlib.suppress(SlurmError):
                if slurm.standing(self.job).state == "RUNNING":
                    slurm.tell("scancel", self.job)
        return code

    def _go_on(self, run: RunDir, command: Sequence[str]) -> int:
        while True:
            code = self._follow(command)
            if self._is_queued:
                with contextlib.suppress(SlurmError):
                    requeue.start_soon(self.job)  # counted from now: it may have saved for long
                return code
            hosts = self._after(run, code)
            if hosts is None:
                return code
            command = self._again_on(hosts)

    def _again_on(self, hosts: Sequence[str]) -> list[str]:
        self._say(f"starts its step again on {', '.join(hosts)}")
        return spares.on(self.command, hosts)

    def _follow(self, command: Sequence[str]) -> int:
        """Start a step and wait for its end; return its exit code."""
        self._step = _start(command)
        end = float("inf")
        while self._step.poll() is None:
            info = signal.sigtimedwait(TAKEN, LOOK)
            if self._pulse and not self._pulse.beat():
                self._stand_aside()
            if info is not None and info.si_signo in PASSED_ON:
                self._was_asked = True
                self._step.send_signal(info.si_signo)
            elif info is not None and info.si_signo == signal.SIGTERM:
                self._was_asked = True
                self._before_the_end()
            self._widen()
            if end == float("inf") and self._new_losses():
                end = time.monotonic() + LEAVE
            if time.monotonic() > end:  # srun waits for a dead host until Slurm has noticed
                self._step.kill()
                with contextlib.suppress(SlurmError):
                    slurm.end_steps(self.job, but=self._own_step)
        code = self._step.returncode
        return code if code >= 0 else 128 - code

    def _stand_aside(self) -> NoReturn:
        """This host was silent for so long that another one looks after the job."""
        self._step.kill()
        self._say("has another batch by now; this one waits, since the job would end with it")
        signal.sigwait([signal.SIGTERM])
        sys.exit(os.EX_UNAVAILABLE)

    def _widen(self) -> None:
        """Ask the step to save and leave, where it could start on more hosts."""
        is_free = not self._was_asked and not self._is_widening
        if self._widening and is_free and self._widening.is_due():
            self._is_widening = True
            self._say("saves its run, to go on with more hosts")
            self._step.send_signal(signal.SIGUSR1)

    def _new_losses(self) -> dict[str, str]:
        """The hosts that the supervisors of the present step have missed."""
        if self.run is None:
            return {}
        found = lost_hosts(self.run, self._this_start)
        return {name: host for name, host in found.items() if name not in self._lost}

    def _before_the_end(self) -> None:
        """Slurm ends the job: queue it again where Slurm will not."""
        standing = self._standing()
        if standing is not None and standing.state != "RUNNING" and self.run is not None:
            self._use_last_chance(self.run, standing)

    def _use_last_chance(self, run: RunDir, standing: Standing) -> None:
        # With PreemptMode=CANCEL a preempted job has ended for Slurm.
        cause = "preempted" if standing.is_preempted else LAST_CHANCE.get(standing.reason)
        if cause is not None and not self._is_queued:
            self._again(run, cause, sorted(self._hosts.dead))

    def _after(self, run: RunDir, code: int) -> list[str] | None:
        """What follows the step's end: hosts for another step, or None for the end of the job."""
        standing = self._standing(ABSENCE)
        if standing is None:
            return None
        if standing.state != "RUNNING":
            self._use_last_chance(run, standing)
            # Slurm has queued it again, or it was cancelled: then this is refused.
            with contextlib.suppress(SlurmError):
                requeue.start_soon(self.job)
            return None
        verdict = run.read_verdict()
        state = verdict.state if verdict else "requeue" if code == os.EX_TEMPFAIL else "failed"
        if code == REFUSED and state == "requeue":
            state = "failed"  # what is there is the verdict of an earlier start
        is_widening = self._is_widening and not self._was_asked and not standing.is_preempted
        if state != "done" and is_widening:
            return self._wider_hosts(run)
        was_asked = self._was_asked or standing.is_preempted  # of which only the step is told
        if state == "requeue" or (state == "failed" and was_asked):
            due = standing.end - time.time() < STOP_LEAD
            cause: Cause = "time limit" if due else "asked to stop"
            self._again(run, "preempted" if standing.is_preempted else cause)
        elif state == "failed" and code not in (0, os.EX_TEMPFAIL) and self._is_lost(run):
            return self._next_hosts(run)
        return None

    def _is_lost(self, run: RunDir) -> bool:
        """Whether a supervisor has gone without a word: missed by another one, or the head."""
        attempt = next(iter(runs.attempts(run)[-1:]), None)
        is_silent = attempt is not None and attempt.job == self.job and attempt.state is None
        return is_silent or bool(self._new_losses())

    def _next_hosts(self, run: RunDir) -> list[str] | None:
        losses = self._new_losses()
        self._lost |= losses
        suspects = sorted(set(losses.values()))
        if not self._may_start(run, "lost node"):
            return None
        try:
            bad = restarts.bad_hosts(run, self.job, suspects)
            hosts = self._hosts.choose(suspects, bad)
        except spares.NoSpareError as error:
            self._say(str(error))
            self._again(run, "lost node", error.dead)
            return None
        self._note(run, "lost node", suspects)
        return hosts

    def _wider_hosts(self, run: RunDir) -> list[str] | None:
        """The hosts of a step that was left for more; None if the job is queued again for them."""
        self._is_widening = False
        if not (self._widening and self._widening.back):
            self._again(run, "more hosts")
            return None
        self._widening.take_back()
        self._note(run, "more hosts")
        return self._hosts.choose()

    def _again(self, run: RunDir, cause: Cause, hosts: Sequence[str] = ()) -> None:
        """Queue the job again, without these hosts, if it may start again."""
        if not self._may_start(run, cause):
            return
        self._note(run, cause, hosts)
        self._is_queued = True
        self._say(f"is queued again: {cause}")
        bad = sorted({*hosts, *restarts.bad_hosts(run, self.job)})
        try:
            self._requeue(bad)
        except SlurmError:
            # Refused, or not heard: a busy controller answers nothing for a while.
            self._standing(ABSENCE)
            try:
                self._requeue(bad)
            except SlurmError as error:
                self._say(f"does not come back: {error}")

    def _requeue(self, bad: Sequence[str]) -> None:
        nodes = self._options.nodes[0] if self._options.nodes else len(self._hosts.all)
        leave_out = cluster.without(self.job, bad, nodes) if bad else []
        if bad and not leave_out:
            self._say(f"cannot do without {', '.join(bad)}: there are no others for it")
        requeue.again(self.job, leave_out)

    def _note(self, run: RunDir, cause: Cause, hosts: Sequence[str] = ()) -> None:
        with contextlib.suppress(OSError):  # a full disk: no reason to end a run
            restarts.note(run, self.job, cause, hosts)

    def _may_start(self, run: RunDir, cause: Cause) -> bool:
        """Whether no person has cancelled the job, and it gets on."""
        if self.job in runs.cancelled(run):
            return False
        if restarts.allowed(run, self.job, cause):
            return True
        step = restarts.saved_step(run)
        reason = f"{cause}, {restarts.MOST} times in a row without a checkpoint after step {step}"
        with contextlib.suppress(OSError):
            run.conclude(Verdict("failed", step, reason))
        self._say(f"does not start again: {reason}")
        return False

    def _standing(self, patience: float = 0.0) -> Standing | None:
        end = time.monotonic() + patience
        while True:
            try:
                return slurm.standing(self.job)
            except SlurmError as error:
                if time.monotonic() > end:
                    self._say(f"is left alone: {error}")
                    return None
            signal.sigtimedwait([signal.SIGTERM], 5.0)

    def _say(self, text: str) -> None:
        name = self.run.name if self.run else ""
        print(f"batch: job {self.job} of run {name} {text}", file=sys.stderr, flush=True)


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []),
    )
