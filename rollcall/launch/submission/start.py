"""Start a planned submission: write the run directory, submit the job, report, and wait."""

import contextlib
import errno
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

import psutil

from rollcall.cli.installation import IS_CHECKOUT, ROOT, USER_PROGRAM, command
from rollcall.launch.node.identity import visible_gpus
from rollcall.launch.program import python
from rollcall.launch.runs import exit_code, find, restarts, root_cause
from rollcall.launch.runs.output import Output, follow
from rollcall.launch.runs.processes import Processes
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.job import Job, needs_slurm, render, render_step
from rollcall.launch.submission import executors, preflight, snapshot
from rollcall.launch.submission.plan import SubmissionPlan, TakenError
from rollcall.messages.refusal import RefusedError
from rollcall.messages.requirements import PACKAGES
from rollcall.messages.text import counted, listed, note, size
from rollcall.records.code import CodeRecord, digest_of
from rollcall.records.job import Cancellation, JobRecord, Submission, local_output, slurm_output
from rollcall.records.run_dir import RunDir
from rollcall.system.files import closest, is_there, open_lines, write_atomic
from rollcall.system.process import StoppedProcesses
from rollcall.system.timer import Every

ASK_EVERY = 2.0
"""Seconds between two calls of squeue while waiting."""
CONFIGURATION = (".yaml", ".yml", ".toml")
"""Suffixes of files that say what a script does, beside its sources."""


def start(submission: SubmissionPlan, local: bool) -> int:
    """Start a run, or say why there is nothing to start; return the exit code.

    If it is refused, nothing is queued or left behind. TakenError asks for another plan.
    """
    run = submission.run
    reason = None if submission.is_new else reason_not_to_submit(run, submission.resume)
    if reason is not None:
        if other := difference(submission):
            reason += f", but this request differs: {other}"
            raise RefusedError(f"run {run.name} {reason}; choose another --name, or --name auto")
        note(f"run {run.name} {reason}")
        return 0
    needed = PACKAGES if submission.job.is_training else ("psutil",)  # of the job's processes
    if lacks := [name for name in needed if find_spec(name) is None and not submission.job.python]:
        raise ModuleNotFoundError(name=lacks[0])  # requirements.py explains it
    if submission.job.allocation:
        return _in_allocation(submission, submission.job.allocation)
    return _on_this_machine(submission) if local else _on_slurm(submission)


def tell_of_interrupt(submission: SubmissionPlan) -> bool:
    """Return True, and say so, if a Ctrl-C left the run that was started alone."""
    run = submission.run
    if len(Submission.read(run.path)) == submission.before:
        return False  # nothing was started, or it was stopped
    status, cancel = (_command(name, run) for name in ("status", "cancel"))
    print(f"\nthe run may go on; see {status}, or end it: {cancel}", file=sys.stderr)
    return True


def reason_not_to_submit(run: RunDir, resume: bool) -> str | None:
    """Return why there is nothing to submit, or None; refuse a failed run without `resume`."""
    if live := _live_jobs(run):
        return f"is live ({listed(live, 3)}): nothing is submitted"
    verdict = run.read_verdict()
    if resume:
        return None
    if verdict is not None and verdict.state == "done":
        return f"is finished ({verdict.reason}): nothing is submitted; --resume continues it"
    newest = find.newest_attempt(run)
    if (verdict and verdict.state == "failed") or (newest and newest.state == "failed"):
        why = f" ({verdict.reason})" if verdict else ""
        advice = "add --resume to continue it with its own code, or choose another --name"
        raise RefusedError(f"run {run.name} has failed{why}: {advice}")
    return None


def difference(asked: SubmissionPlan) -> str:
    """Return how a request differs from what its run was submitted with; empty if it does not."""
    run, record = asked.run, JobRecord.read(asked.run.path)
    source = CodeRecord.read(run.job / "source.json")
    if record is None and run.config.exists():  # `rollcall train` has no record of its words
        is_training = asked.job.is_training
        return "`rollcall train` started it" if is_training else "a script instead of a training"
    if record is None or source is None or "command" not in record.more:
        return ""
    moved = (text.replace(record.run_directory, str(run.path)) for text in record.more["command"])
    now, before = _program(asked.job.command), _program([*moved])
    more = [text for text in now if text not in before]
    less = [text for text in before if text not in now]
    if more or less:
        return f"{shlex.join(more) or 'fewer words'} instead of {shlex.join(less) or 'nothing'}"
    root = Path(source.root)
    changed = [name for name, _ in source.damage(root, CONFIGURATION)] if root.is_dir() else []
    copies = {path: run.job / path.name for path in asked.recipes}
    changed += [str(path) for path, copy in copies.items() if digest_of(path) != digest_of(copy)]
    return f"{listed(changed, 3)} changed since then" if changed else ""


def _program(command: Sequence[str]) -> list[str]:
    words = list(command[command.index("--") + 1 :])
    return words[3:] if tuple(words[:2]) == USER_PROGRAM else words[2:]


def _live_jobs(run: RunDir) -> list[str]:
    if not (known := find.jobs(run)):
        return []
    newest = known[-1]
    if newest.is_local:
        there = Processes().of(run)
        return [f"process {there[0]} on this machine"] if there else []
    if not slurm.is_available():
        return []
    attempt = find.newest_attempt(run)
    if newest.id == os.environ.get("SLURM_JOB_ID") and attempt and attempt.state is not None:
        return []  # the shell of the allocation in which it ran
    jobs = dict.fromkeys(record.job for record in Submission.read(run.path))
    jobs[newest.id] = None
    # A task of an array, or a group of nodes, is listed under two names: its job id and 12_3, 12+1.
    live: dict[int, str] = {}
    queue = slurm.queue(list(jobs))  # sorted by state; show the jobs by number
    for name, info in sorted(queue.items(), key=lambda item: int(re.split(r"\D", item[0])[0])):
        if info.state not in slurm.FINAL:
            live.setdefault(id(info), f"job {name} {info.state}")
    return list(live.values())


def _on_slurm(submission: SubmissionPlan) -> int:
    run, job = submission.run, submission.job
    preflight.check_root(job, run.path.parent)
    _prepare_environment(job)
    expected = preflight.check(job, render(job))
    with _prepared(submission):
        jobs = [_submit(submission, job)]
    for later in submission.later:
        after = {**later.options, "dependency": f"afterany:{jobs[-1]}"}
        try:
            jobs.append(_submit(submission, replace(later, options=after)))
        except RefusedError as error:
            raise RefusedError(f"{error} (already queued: {', '.join(jobs)})") from None
    print(f"submitted:     job {jobs[0]}, {counted(job.nodes, 'node')}, {expected}")
    if len(jobs) > 1:
        print(f"then:          jobs {', '.join(jobs[1:])}, each after the one before")
    print(_where(run, "array" in job.options), flush=True)
    if not submission.wait:
        return 0
    ask, output = Every(ASK_EVERY), Output([slurm_output(run.job, job_id) for job_id in jobs])

    def is_over() -> bool:
        with contextlib.suppress(slurm.SlurmError):  # a busy controller may not answer for a while
            return ask.is_due() and slurm.has_ended(jobs[-1])
        return False

    follow(output, is_over)
    return _exit_code(run, jobs)


def _in_allocation(submission: SubmissionPlan, job_id: str) -> int:
    """Run a job as a step of the allocation whose shell this is, and show its output."""
    run, job = submission.run, submission.job
    before = len(find.attempts(run))  # others may have had this id
    _prepare_environment(job)
    with _prepared(submission):
        output = Output([slurm_output(run.job, job_id)])
        output.skip()  # of an earlier run in this allocation
        script = ["bash", "-c", render_step(job)]
        # Not in the terminal's group: srun would end the step at Ctrl-C.
        step = subprocess.Popen(script, start_new_session=True, stdin=subprocess.DEVNULL)
        with _or_stop(step.wait), _or_stop(step.terminate):
            _record(submission, job_id)
    where = f"of your allocation {job_id}\nrun directory: {run.path}"
    begun = f"started:       {counted(job.nodes, 'node')} {where}"

    def cancel() -> None:
        step.send_signal(signal.SIGUSR2)  # srun passes it on to the supervisors

    return _wait(begun, run, job_id, before, output, lambda: step.poll() is not None, cancel)


@contextlib.contextmanager
def _or_stop(stop: Callable[[], object]) -> Iterator[None]:
    """Stop what was started if the block fails: without its record, no command would find it."""
    try:
        yield
    except BaseException:
        stop()
        raise


def _wait(
    begun: str,
    run: RunDir,
    job: str,
    before: int,
    output: Output,
    is_over: Callable[[], bool],
    stop: Callable[[], object],
) -> int:
    """Show a run's output until it is over; Ctrl-C asks it to stop, and again does not wait."""
    is_cancelled = False
    try:
        print(begun, flush=True)
        follow(output, is_over)
    except KeyboardInterrupt:
        is_cancelled = True
        stop()
        print("\nasked the run to save and stop; Ctrl-C again does not wait", file=sys.stderr)
        follow(output, is_over)
    return _exit_code(run, [job], before, is_cancelled)


def _prepare_environment(job: Job) -> None:
    executors.clear_inherited_environment()
    if job.python and Path(job.python[0]).is_absolute():  # not a container's
        python.activate(job.python[0], os.environ)


def _submit(submission: SubmissionPlan, job: Job) -> str:
    with contextlib.ExitStack() as held:
        held.enter_context(_without_interrupts())  # sbatch queues the job before it answers
        job_id = executors.Slurm(submission.run.job, render(job)).start()
        with _or_stop(lambda: slurm.tell("scancel", job_id)):
            held.close()
            _record(submission, job_id)
    return job_id


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let Ctrl-C and a closed terminal wait, here, in other threads, and in what is started."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    waiting: list[int] = []  # other threads receive what this one blocks
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    if threading.current_thread() is not threading.main_thread() or None in handlers.values():
        handlers = {}  # Python cannot replace them here
    try:
        for number in handlers:
            signal.signal(number, lambda received, _: waiting.append(received))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for received in waiting:
            signal.raise_signal(received)


def _on_this_machine(submission: SubmissionPlan) -> int:
    run, job = submission.run, submission.job
    is_array, before = "array" in job.options, len(find.attempts(run))
    if submission.later:
        raise RefusedError("--chain needs Slurm, and this machine has no Slurm cluster")
    if left_out := needs_slurm(job):
        note(f"this run starts on this machine, without Slurm; left out: {listed(left_out, 9)}")
    needed = sum(group.nodes * group.gpus for group in job.all_groups)
    visible = len(visible_gpus(os.environ))
    minutes = slurm.seconds(job.time) / 60 if job.time else None
    if needed > visible:
        have = f"{visible}; ask for no more" if visible else "none; remove the option to use CPUs"
        wants = f"{counted(job.nodes, 'node')} would need {counted(needed, 'GPU')}"
        raise RefusedError(f"--gpus-per-node: {wants}, and this machine has {have}")
    _prepare_environment(job)
    with _prepared(submission):
        with contextlib.chdir(job.directory):
            local = executors.Local(run.job)
            if is_array:
                process = local.start(_array(job, run, needed, minutes), 1, None)
            else:
                process = local.start(job.command, job.nodes, minutes)
        with _or_stop(lambda: os.kill(int(process.job_id), signal.SIGTERM)):
            _record(submission, process.job_id)
    what = "an array of runs" if is_array else counted(job.nodes, "node")
    begun = f"submitted:     process {process.job_id}, {what} on this machine\n"
    begun += _where(run, is_array)
    if not submission.wait:
        print(begun, flush=True)
        return 0
    paths = [local_output(run.job, process.job_id, node) for node in range(job.nodes)]

    def cancel() -> None:
        with contextlib.suppress(OSError):  # else the run counts as failed if its script does not
            Cancellation([process.job_id], time.time()).append(run.path)  # stop in order
        for pid in Processes().supervisors(run) if process.done() else [int(process.job_id)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    stopped = StoppedProcesses()

    def is_over() -> bool:
        for pid in stopped.find([int(process.job_id)]):  # by somebody; a supervisor has its parent
            os.kill(pid, signal.SIGCONT)
        return process.done() and not Processes().supervisors(run)  # they outlive it

    output = Output(paths)
    return _wait(begun, run, process.job_id, before, output, is_over, cancel)


def _array(job: Job, run: RunDir, gpus: int, minutes: float | None) -> tuple[str, ...]:
    cells = [word for word in job.command if word.startswith("--cells=")]
    words = [f"--run-dir={run.path}", *cells, f"--tasks={job.options['array']}"]
    words += [f"--nodes={job.nodes}", f"--gpus={gpus}", f"--cpus={job.cpus_per_task * job.nodes}"]
    words += [f"--minutes={minutes}"] if minutes else []
    return (*command("array"), *words, "--", *job.command)


@contextlib.contextmanager
def _prepared(submission: SubmissionPlan) -> Iterator[None]:
    """Create the run directory with code and recipe; remove a new one if starting fails."""
    run, is_new = submission.run, False
    try:
        is_new = run.create()
        if submission.is_new and not is_new:
            raise TakenError(f"another submission has just created run {run.name}")
        run.job.mkdir(exist_ok=True)
        with open_lines(run.path / Submission.FILE) as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)  # until the job is recorded
            known = Submission.read(run.path)
            if len(known) != submission.before or not run.job.exists():
                is_new = False  # it is the other's by now
                raise TakenError(f"another submission of run {run.name} has just come first")
            _write_job(submission)
            if submission.resume:
                run.forget_verdict()  # supervisors skip a run whose verdict is `done`
            if not is_new:
                whose = "the code that it has" if submission.code is None else "the current code"
                note(f"run {run.name} exists: it continues, with {whose}")
            elif submission.resume:
                note(f"there was no run {run.name} to resume: it starts from the beginning")
            yield
    except BaseException as error:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise RefusedError(_cannot_be_written(run, error)) from None
        raise


def _cannot_be_written(run: RunDir, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename}: {error.strerror}; --root chooses another directory"
    # The error may name the file that was read.
    place = os.statvfs(closest(run.path.parent))
    left = f"{size(place.f_bavail * place.f_frsize)} and {place.f_favail:,} inodes"
    return (
        f"{run.path}: {error.strerror}: {run.path.parent} has {left} left, and nothing of the run "
        "is kept; free some there, or choose another --root"
    )


def _write_job(submission: SubmissionPlan) -> None:
    run = submission.run
    for recipe in submission.recipes:
        shutil.copyfile(recipe, run.job / recipe.name)
    store = run.path.parent / ".code"
    if submission.code is not None:
        snapshot.take(submission.code, run.code, run.job / "source", store)
    if submission.launcher is not None:
        snapshot.take(submission.launcher, run.launcher, run.launcher, store)
    for number, modules in enumerate(submission.modules):
        snapshot.take(modules, run.modules(number), run.modules(number), store)
    if submission.launcher is not None and submission.job.python:
        # The one package that supervisors need, for a Python that may not have it. Its compiled
        # part works with every Python from 3.6 on.
        ignore = shutil.ignore_patterns("tests")
        shutil.copytree(
            Path(psutil.__file__).parent, run.launcher / "psutil", ignore=ignore, dirs_exist_ok=True
        )
    for name, text in submission.files.items():
        write_atomic(run.job / name, text)
    job = submission.job
    own = (str(run.path), job.nodes, job.is_training, job.spares, job.min_nodes)
    JobRecord(*own, more=asdict(job), continues=job.continues).write(run.path)
    installed = {f"{package.name}=={package.version}\n" for package in distributions()}
    write_atomic(run.job / "packages.txt", "".join(sorted(installed)))


def _record(submission: SubmissionPlan, job_id: str) -> None:
    versions = {"python": sys.version.split()[0]}
    for package in ("torch", "torchvision", "submitit", "pydantic"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    record = Submission(job_id, time.time(), list(submission.argv), str(Path.cwd()), versions)
    record.append(submission.run.path)


def _where(run: RunDir, is_array: bool) -> str:
    # The tasks of an array are separate runs, each with its own logs.
    follow_it = _command("watch", run) if is_array else _command("logs", run, "--follow")
    end_it = f"end it:        {_command('cancel', run)}"
    return f"run directory: {run.path}\nfollow it:     {follow_it}\n{end_it}"


def _command(command: str, run: RunDir, *options: str) -> str:
    """Return a rollcall command about a run, as the user can type it in this directory."""
    rollcall = ["rollcall"]
    if IS_CHECKOUT and "ROLLCALL_TORCH" in os.environ:  # set by env/run
        # `rollcall network` and `accept` change the directory; PWD is the shell's
        is_here = Path.cwd() == ROOT == Path(os.environ.get("PWD", ""))
        rollcall = ["./env/run" if is_here else f"{ROOT}/env/run", "--quiet", "rollcall"]
    elif IS_CHECKOUT:
        rollcall = [sys.executable, f"{ROOT}/env/bin/rollcall"]
    return shlex.join([*rollcall, command, *options, find.typed(run)])


def _exit_code(
    run: RunDir, jobs: Sequence[str], before: int = 0, is_cancelled: bool = False
) -> int:
    """Return the exit code of a run whose jobs are over; say so if they did not end in order."""
    code = exit_code.of_run(run, jobs, before, is_cancelled)
    newest = find.newest_attempt(run)
    was_removed = is_there(run.path) and not is_there(run.job)  # made again by a training, to save
    is_told = not code or (newest and newest.job in jobs and newest.state is not None)
    if is_told and not was_removed:
        return code
    text = f"rollcall: error: job {jobs[-1]} ended before the run ended"
    if code == exit_code.CANCELLED:
        text = "rollcall: the run was stopped before it could begin or save"
    if was_removed and not code:
        text = "rollcall: the run is done, without its records"
    cause = root_cause.of_newest(run).what
    if was_removed:
        saved = restarts.saved_step(run)
        cause = f"the run directory {run.path} was removed; it now has only step {saved}"
    print(f"{text}: {cause}" if cause != root_cause.UNKNOWN else text, file=sys.stderr)
    return code
