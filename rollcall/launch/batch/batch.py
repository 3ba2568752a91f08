"""`rollcall batch srun …`: the first process of a job. It starts the step and requeues the job.

Slurm itself requeues only after a preemption without grace time or the loss of a node, and never a
job that ended with an exit code. The exit code is the one of the step.
"""

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from rollcall.config import ConfigError
from rollcall.launch.batch import placement
from rollcall.launch.node.batch_process import BatchHeartbeat, leave_step, stand_by
from rollcall.launch.node.identity import job_of, start_of
from rollcall.launch.runs import find, resolve, restarts
from rollcall.launch.runs.decision import MAX_IN_VAIN, UNASKED, RestartFacts, decide
from rollcall.launch.scheduler import cluster, slurm
from rollcall.launch.scheduler.job import STOP_LEAD
from rollcall.launch.scheduler.slurm import JobStatus, SlurmError
from rollcall.launch.submission.options import span
from rollcall.messages.refusal import REFUSED, RefusedError
from rollcall.records.attempt import AttemptRecord, NodeFailure, NodeState
from rollcall.records.job import RestartCause, Submission
from rollcall.records.run import Verdict
from rollcall.records.run_dir import RunDir
from rollcall.system.files import is_there
from rollcall.system.process import outlast_full_disks, wait_for_signal
from rollcall.system.timer import Every, RunningClock

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that srun sends on to the supervisors. SIGTERM would make srun end them, but Slurm sends
them that one itself."""
TAKEN = (*PASSED_ON, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
LOOK = 1.0
"""Seconds between two looks at the step."""
LOSS_POLL = 2.0
"""Seconds between two looks at whether a host has been lost, and this one taken for lost."""
COMES_BACK: dict[str, RestartCause] = {"TimeLimit": "time limit", "JobLaunchFailure": "lost node"}
"""Slurm's reasons for ending a job that we requeue. JobLaunchFailure: Slurm took the script's host
for dead, and kills the script when the host is back."""
MOST_ASKED = 16
"""Most hosts without a report of their loss that are asked whether they are alive."""
STEP_END = 120.0
"""Seconds for which a step may end that lost its srun: its run saves meanwhile."""
ABSENCE = 600.0
"""Seconds for which Slurm's controller may be away when the step has ended."""


def main(argv: Sequence[str]) -> int:
    """Run the step to its end, and requeue the job if the run is to continue."""
    # Blocked, not handled: each is taken when it is useful.
    signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)
    outlast_full_disks()
    parser = argparse.ArgumentParser(prog="rollcall batch", allow_abbrev=False)
    resolve.add_run_options(parser)
    nodes = "on how many nodes the step can run, in a job script of your own"
    parser.add_argument("--nodes", type=span, metavar="MIN-MAX", help=nodes)
    after = "a shell line to run when the step has ended; may be repeated"
    parser.add_argument("--teardown", action="append", default=[], metavar="LINE", help=after)
    bad = "check all hosts first, and use spares in place of bad ones"
    parser.add_argument("--preflight", action="store_true", help=bad)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="srun …")
    options = parser.parse_args(argv)
    if "SLURM_JOB_ID" not in os.environ or not options.command:
        raise RefusedError("use this in a job script: exec … batch srun …")
    # In a separate step: `--output=FILE`, and `--number=N` if it takes over, are not its words.
    own_options = [text for text in (options.output, options.number) if text]
    words = argv[len(own_options) :]
    try:
        batch = BatchProcess(options, words, job_of(os.environ))
        code = batch.go()
        _tear_down(options.teardown, code)
        known = Submission.read(batch.run.path) if batch.run is not None else []
        # The next job of a chain continues the run: Slurm need not call this one FAILED.
        is_part = batch.job in [submission.job for submission in known[:-1]]
        return 0 if code == os.EX_TEMPFAIL and is_part else code
    except OSError as error:  # srun is missing, or the run directory is not writable
        print(f"rollcall: error: {error}", file=sys.stderr)
        return REFUSED


def _tear_down(lines: Sequence[str], code: int) -> None:
    """Run the lines of `--teardown`; how they end does not change how the job ends."""
    if lines:
        command, env = ["bash", "-c", "\n".join(lines)], {"ROLLCALL_EXIT_CODE": str(code)}
        if ended := subprocess.run(command, env=os.environ | env, preexec_fn=_unblock).returncode:
            print(f"batch: the lines of --teardown end with exit code {ended}", file=sys.stderr)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


class ReplacedError(Exception):
    """Another batch process took over, because this one was silent for too long."""


class BatchProcess:
    """A job's first process, which starts its step."""

    def __init__(self, options: argparse.Namespace, words: Sequence[str], job: str) -> None:
        self.command: list[str] = options.command
        self.job = job
        self.run: RunDir | None = None
        self._options, self._words = options, words
        self._this_start = start_of(job, os.environ)
        self._own_step = leave_step(options.output) if options.output else None
        self._hosts: placement.Hosts
        self._step: subprocess.Popen[bytes]
        self._heartbeat: BatchHeartbeat | None = None
        self._expansion: placement.Expansion | None = None
        self._lost: dict[str, str] = {}
        self._bad: dict[str, str] = {}  # hosts that the preflight found bad, and why
        self._was_asked = False
        self._was_srun_killed = False
        self._is_expanding = False
        self._is_requeued = False
        self._continues = True
        self._supervisor: Sequence[str] = ()  # what srun starts on each host

    def go(self) -> int:
        """Look after the step, restarting it on the remaining hosts; return its exit code."""
        try:
            facts = resolve.facts_of_batch(self._options, os.environ, self.job)
        except ConfigError:
            return self._follow(self.command)  # the step says what is wrong
        except resolve.CommandError as error:
            print(f"rollcall: note: the job will not be requeued: {error}", file=sys.stderr)
            return self._follow(self.command)
        self.run, self._continues = facts.run, facts.continues
        self._supervisor = facts.command
        if facts.is_named and (text := resolve.finished(self.run)):
            print(text)
            return 0
        self._hosts = placement.Hosts(os.environ, facts.nodes, facts.span)
        if facts.span:
            self._expansion = placement.Expansion(self.run, self.job, self._hosts)
        code = self._hold_claims(self.run, self._options.number)
        if self._own_step is not None and not self._is_requeued:
            # Slurm waits for the end of the script, which died with its host.
            with contextlib.suppress(SlurmError):
                if slurm.status(self.job).state == "RUNNING":
                    slurm.tell("scancel", self.job)
        return 0 if code == os.EX_UNAVAILABLE and resolve.finished(self.run) else code

    def _hold_claims(self, run: RunDir, number: int) -> int:
        """Be the job's batch process from one claim to the next, until the job ends."""
        takes_over = self._own_step is not None
        stands_by = takes_over and not number
        while True:
            number = stand_by(run, self._this_start, number) if stands_by else number
            of_job = (self._this_start, number, self._words, self._hosts.may_change)
            self._heartbeat = BatchHeartbeat(run, *of_job)
            try:
                if not takes_over:
                    return self._go_on(run, self._first_command(run))
                hosts = None if resolve.finished(run) else self._next_hosts(run)
                return self._go_on(run, self._restarted_on(hosts)) if hosts else os.EX_UNAVAILABLE
            except ReplacedError:
                self._say("was taken over by another batch process; this one stands by")
                stands_by = takes_over = True
            finally:
                self._heartbeat.end(has_ended=not self._heartbeat.is_replaced())

    def _first_command(self, run: RunDir) -> Sequence[str]:
        """Return the step's command line, on other hosts if the preflight finds bad ones."""
        if not self._options.preflight:
            return self.command
        begin = time.monotonic()
        try:
            self._bad = bad = placement.bad_hosts(self.job, self._hosts.all, run)
            chosen = self._hosts.choose(bad=[*bad])
        except (OSError, SlurmError, placement.NoSpareError) as error:  # the run can do without it
            self._say(f"starts without the preflight: {error}")
            return self.command
        took = f"the preflight took {time.monotonic() - begin:.1f} s"
        self._say(f"has {len(self._hosts.all)} hosts, {len(bad)} bad; {took}")
        for host, reason in bad.items():
            used = "uses, because no other host is left," if host in chosen else "leaves out"
            self._say(f"{used} {host}: {reason}")
        can_move = bad and self._hosts.may_change
        return placement.on(self.command, self._supervisor, chosen) if can_move else self.command

    def _go_on(self, run: RunDir, command: Sequence[str]) -> int:
        while True:
            alive = [host for host in self._hosts.all if host not in self._hosts.dead]
            if self._heartbeat is not None and len(alive) > self._hosts.most:
                self._heartbeat.have_standby(alive[-1])
            code = self._follow(command)
            self._give_way()
            if self._is_requeued:
                with contextlib.suppress(SlurmError):  # from now on: the save may have taken long
                    slurm.start_soon(self.job)
                return code
            if (hosts := self._after(run, code)) is None:
                return code
            command = self._restarted_on(hosts)

    def _restarted_on(self, hosts: Sequence[str]) -> list[str]:
        self._give_way()
        with contextlib.suppress(SlurmError):  # two steps would need each GPU twice
            slurm.end_steps(self.job, but=self._own_step)
        self._say(f"restarts its step on {', '.join(hosts)}")
        return placement.on(self.command, self._supervisor, hosts)

    def _follow(self, command: Sequence[str]) -> int:
        self._step = subprocess.Popen(command, start_new_session=True, preexec_fn=_unblock)
        clock, end, seldom = RunningClock(), math.inf, Every(LOSS_POLL)
        first, lost, was_ended = self.run.next_attempt() if self.run else 0, False, False
        while self._step.poll() is None:
            number = wait_for_signal(TAKEN, LOOK)
            is_due = seldom.is_due()
            if is_due:
                self._give_way(self._step)
            if number in PASSED_ON:
                self._was_asked = True
                self._step.send_signal(number)
            elif number == signal.SIGTERM:
                self._was_asked = True
                self._requeue_ended(self._status())
            self._expand()
            if is_due and lost != bool(self._new_losses()):  # a node may refute that it is lost
                lost = not lost
                end = clock.read() + (decide("step runs", "node lost").grace or 0)
                end = end if lost else math.inf
            if is_due and end == math.inf and (attempt := self._ended_attempt(first)):
                facts = RestartFacts(failed=attempt.state == "failed")  # it may still start again
                end = clock.read() + (decide("step runs", "run ended", facts).grace or 0)
            if clock.read() > end and not lost and not self._have_all_ended(first):
                end = math.inf
            if clock.read() > end:  # srun waits for a dead host, or slurmstepd, for minutes
                was_ended = True
                self._step.kill()
                with contextlib.suppress(SlurmError):
                    slurm.end_steps(self.job, but=self._own_step)
        code = self._step.returncode
        self._was_srun_killed = code < 0 and not was_ended
        if self._was_srun_killed:
            self._end_left_step(-code)
        attempt = self._ended_attempt(first) if code < 0 else None
        if attempt is not None and attempt.exit_code is not None:
            return attempt.exit_code
        return code if code >= 0 else 128 - code

    def _ended_attempt(self, first: int) -> AttemptRecord | None:
        """Return the newest attempt of this step, from `first` on, if the run ended with it."""
        if self.run is None or not is_there(self.run.verdict):
            return None
        attempt = find.newest_attempt(self.run)
        is_ours = attempt is not None and attempt.number >= first and attempt.state is not None
        return attempt if is_ours else None

    def _have_all_ended(self, first: int) -> bool:
        """Return True if all supervisors have written how their parts of the run ended."""
        attempt = self._ended_attempt(first)
        if self.run is None or attempt is None:
            return False
        parts = NodeState.read_all(self.run.path, attempt=attempt.number).values()
        return all(part.state != "running" for part in parts)

    def _end_left_step(self, number: int) -> None:
        """End the step that srun left behind: two attempts at once would need each GPU twice."""
        self._say(f"lost its srun, killed by {signal.Signals(number).name}; its step is ended")
        end = time.monotonic() + STEP_END
        with contextlib.suppress(SlurmError):
            slurm.end_steps(self.job, but=self._own_step, kills=False)
            while slurm.steps(self.job, self._own_step) and time.monotonic() < end:
                self._was_asked |= wait_for_signal([signal.SIGTERM], LOOK) is not None
            slurm.end_steps(self.job, but=self._own_step)

    def _give_way(self, step: "subprocess.Popen[bytes] | None" = None) -> None:
        """Do nothing more if another host took over: raise ReplacedError."""
        is_replaced = self._heartbeat is not None and self._heartbeat.is_replaced()
        if is_replaced and decide("step runs", "replaced").action == "stand aside":
            if step is not None:
                step.kill()
            raise ReplacedError

    def _expand(self) -> None:
        if self._expansion is None or self._is_expanding:
            return
        rule = decide("step runs", "hosts free", RestartFacts(asked=self._was_asked))
        if rule.action == "save the run" and self._expansion.is_due():
            self._is_expanding = True
            self._say("saves its run to continue with more hosts")
            self._step.send_signal(signal.SIGUSR1)

    def _new_losses(self) -> dict[str, str]:
        """Return the hosts lost in this start of the job, by the name of the round of each."""
        if self.run is None:
            return {}
        failures = NodeFailure.read_all(self.run.path, key=f"{self._this_start}.*").items()
        losses = {path.name: failure.host for path, failure in failures if failure.is_lost}
        return {name: host for name, host in losses.items() if name not in self._lost}

    def _requeue_ended(self, status: JobStatus | None) -> None:
        """Requeue a job that Slurm ends, if Slurm itself will not."""
        if status is None or status.state == "RUNNING" or self.run is None or self._is_requeued:
            return
        # With PreemptMode=CANCEL, Slurm considers a preempted job as ended.
        cause = "preempted" if status.is_preempted else COMES_BACK.get(status.reason)
        facts = RestartFacts(finished=self._step.returncode == 0, slurm_cause=cause is not None)
        if decide("step runs", "job ended", facts).action == "requeue" and cause is not None:
            self._requeue(self.run, cause, sorted(self._hosts.dead))

    def _after(self, run: RunDir, code: int) -> list[str] | None:
        """Return the hosts for another step, or None if the job ends."""
        status = self._status(ABSENCE)
        if status is None:
            return None
        if status.state != "RUNNING":
            self._requeue_ended(status)
            # If Slurm has not requeued it, because it was cancelled, this is refused.
            with contextlib.suppress(SlurmError):
                slurm.start_soon(self.job)
            return None
        facts = self._facts(run, code, status)
        action = decide("step runs", "step ended", facts).action
        if action == "start elsewhere":
            cause: RestartCause = "srun was killed" if facts.srun_killed else "lost node"
            return self._more_hosts(run) if facts.expanding else self._next_hosts(run, cause)
        if action == "requeue":
            self._is_expanding = False
            due = status.end - time.time() < STOP_LEAD
            cause = "time limit" if due else "asked to stop"
            cause = "preempted" if status.is_preempted else cause
            self._requeue(run, "more hosts" if facts.expanding else cause)
        return None

    def _facts(self, run: RunDir, code: int, status: JobStatus) -> RestartFacts:
        """Gather what is known of a step that has ended with this exit code."""
        verdict = run.read_verdict()
        state = verdict.state if verdict else "requeue" if code == os.EX_TEMPFAIL else "failed"
        if code == REFUSED and state == "requeue":
            state = "failed"  # an earlier start wrote this verdict
        is_final = verdict is not None and verdict.state == "failed"
        was_asked = self._was_asked or status.is_preempted  # Slurm may signal only the step
        attempt = find.newest_attempt(run)
        # The supervisor of the head has vanished; others may miss a node.
        is_silent = attempt is not None and attempt.job == self.job and attempt.state is None
        return RestartFacts(
            done=state == "done",
            saved=state == "requeue",
            failed=state == "failed",
            asked=was_asked,
            expanding=self._is_expanding and not was_asked,
            srun_killed=self._was_srun_killed and not was_asked and not is_final,
            hosts_back=self._expansion is not None and bool(self._expansion.back),
            node_lost=code == os.EX_UNAVAILABLE
            or (code not in (0, os.EX_TEMPFAIL) and (is_silent or bool(self._new_losses()))),
        )

    def _next_hosts(self, run: RunDir, cause: RestartCause = "lost node") -> list[str] | None:
        losses = self._new_losses()
        self._lost |= losses
        suspects = sorted(set(losses.values()))
        if suspects:
            self._say(f"lost {', '.join(suspects)}")
        if not self._may_start(run, cause):
            return None
        try:
            bad = [*self._bad, *restarts.bad_hosts(run, self.job, suspects)]
            before = {*self._hosts.dead}
            hosts = self._hosts.choose(sorted({*suspects, *self._unheard(run)}), bad)
            for host in self._hosts.dead - before:
                placement.remember(run, host, "it no longer answered")
        except placement.NoSpareError as error:
            self._say(str(error))
            self._requeue(run, cause, error.dead)
            return None
        restarts.note(run, self.job, cause, sorted({*suspects, *self._hosts.dead} - before))
        return hosts

    def _unheard(self, run: RunDir) -> set[str]:
        """Return the hosts whose supervisors ended without a word: only one loss is reported."""
        attempt = find.newest_attempt(run)
        if attempt is None or attempt.job != self.job:
            return set()
        parts = NodeState.read_all(run.path, attempt=attempt.number).values()
        hosts = {*attempt.hosts} - {part.host for part in parts if part.state != "running"}
        return hosts if len(hosts) <= MOST_ASKED else set()

    def _more_hosts(self, run: RunDir) -> list[str]:
        """Return the hosts for a larger step, now that lost ones answer again."""
        assert self._expansion is not None
        self._is_expanding = False
        self._expansion.take_back()
        restarts.note(run, self.job, "more hosts")
        return self._hosts.choose(bad=[*self._bad])

    def _requeue(self, run: RunDir, cause: RestartCause, hosts: Sequence[str] = ()) -> None:
        if not self._may_start(run, cause):
            return
        restarts.note(run, self.job, cause, hosts, is_queued=True)
        self._is_requeued = True
        self._say(f"is requeued: {cause}")
        bad = sorted({*hosts, *self._bad, *restarts.bad_hosts(run, self.job)})
        try:
            self._requeue_without(bad)
        except SlurmError:
            # Refused, or not heard: a busy controller may not answer for a while.
            self._status(ABSENCE)
            try:
                self._requeue_without(bad)
            except SlurmError as error:
                self._say(f"could not be requeued: {error}")

    def _requeue_without(self, bad: Sequence[str]) -> None:
        nodes = self._hosts.fewest or len(self._hosts.all)
        leave_out = cluster.without(self.job, bad, nodes) if bad else []
        if bad and not leave_out:
            self._say(f"cannot exclude {', '.join(bad)}: too few other nodes")
        slurm.requeue_own_job(self.job, leave_out)

    def _may_start(self, run: RunDir, cause: RestartCause) -> bool:
        # A program that ever saved when it was asked to stop need not start over.
        starts_over = cause in UNASKED and not (
            self._continues
            or self._step.returncode == os.EX_TEMPFAIL
            or restarts.orderly_stops(run) > 0
        )
        facts = RestartFacts(
            cancelled=self.job in find.cancelled(run),
            starts_over=starts_over,
            in_vain=restarts.in_vain(run, self.job, cause),
        )
        action = decide("restart wanted", "facts known", facts).action
        if action != "fail":
            return action == "start again"
        step = restarts.saved_step(run)
        if facts.starts_over:
            advice = "exits with 75 when it is asked to stop, or --max-restarts is given"
            reason = f"{cause}; a script restarts only if it {advice}"
        else:
            reason = f"{cause}, {MAX_IN_VAIN} times in a row without a checkpoint after step {step}"
        # A program that saves or finishes after all replaces this; one that is killed cannot.
        with contextlib.suppress(OSError):
            run.conclude(Verdict("failed", step, reason))
        if cause not in UNASKED or self._step.returncode is not None:
            self._say(f"is not restarted: {reason}")
        return False

    def _status(self, patience: float = 0.0) -> JobStatus | None:
        end = time.monotonic() + patience
        while True:
            try:
                return slurm.status(self.job)
            except SlurmError as error:
                if time.monotonic() > end:
                    self._say(f"is not changed: {error}")
                    return None
            wait_for_signal([signal.SIGTERM], 5.0)

    def _say(self, text: str) -> None:
        name = self.run.name if self.run else ""
        print(f"batch: job {self.job} of run {name} {text}", file=sys.stderr, flush=True)
