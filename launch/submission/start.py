"""Start a planned submission: write the run directory, submit the job, report, and wait."""

import contextlib
import errno
import fcntl
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from rollcall.installation import IS_CHECKOUT, ROOT, command
from rollcall.launch.node.identity import visible_gpus
from rollcall.launch.program import python
from rollcall.launch.runs import find, root_cause
from rollcall.launch.runs.output import Output, exit_code, follow
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.job import Job, render, render_step
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.launch.submission import executors, existing, preflight, snapshot
from rollcall.launch.submission.submission import Submission, TakenError, note
from rollcall.records.files import open_lines, write_atomic
from rollcall.records.job import Cancellation, JobRecord, local_output, slurm_output
from rollcall.records.job import Submission as SubmissionRecord
from rollcall.refusal import RefusedError
from rollcall.run_dir import RunDir
from rollcall.text import size
from rollcall.timer import Every

ASK_EVERY = 2.0
"""Seconds between two calls of squeue while waiting."""


def start(submission: Submission, local: bool) -> int:
    """Start a run, or say why there is nothing to start; return the exit code.

    Raises:
        RefusedError, SlurmError: the run cannot start; nothing is queued or left behind.
        TakenError: another submission has just created the same run.
    """
    run = submission.run
    if (reason := existing.reason_not_to_submit(run, submission.resume)) is not None:
        note(f"run {run.name} {reason}")
        return 0
    if submission.job.allocation:
        return _in_allocation(submission, submission.job.allocation)
    return _on_this_machine(submission) if local else _on_slurm(submission)


def _on_slurm(submission: Submission) -> int:
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
    print(f"submitted:     job {jobs[0]}, {_nodes(job)}, {expected}")
    if len(jobs) > 1:
        print(f"then:          jobs {', '.join(jobs[1:])}, each after the one before")
    _say_where(run, "array" in job.options)
    if not submission.wait:
        return 0
    ask, output = Every(ASK_EVERY), Output([slurm_output(run.job, job_id) for job_id in jobs])

    def is_over() -> bool:
        with contextlib.suppress(SlurmError):  # a busy controller may not answer for a while
            return ask.is_due() and slurm.has_ended(jobs[-1])
        return False

    try:
        follow(output, is_over)
    except KeyboardInterrupt:
        print(f"\nthe job keeps running; to end it: {_command('cancel', run)}", file=sys.stderr)
        return 128 + signal.SIGINT
    return _exit_code(run, jobs)


def _in_allocation(submission: Submission, job_id: str) -> int:
    """Run a job as a step of the allocation whose shell this is, and show its output."""
    run, job = submission.run, submission.job
    _prepare_environment(job)
    with _prepared(submission):
        output = Output([slurm_output(run.job, job_id)])
        output.skip()  # of an earlier run in this allocation
        script = ["bash", "-c", render_step(job)]
        # Not in the terminal's group: srun would end the step at Ctrl-C.
        step = subprocess.Popen(script, start_new_session=True, stdin=subprocess.DEVNULL)
        with _or_stop(step.wait), _or_stop(step.terminate):
            _record(submission, job_id)
    print(f"started:       {_nodes(job)} of your allocation {job_id}")
    print(f"run directory: {run.path}", flush=True)
    # srun passes the signal on to the supervisors.
    ask = functools.partial(step.send_signal, signal.SIGUSR2)
    return _wait(run, job_id, output, lambda: step.poll() is not None, ask)


@contextlib.contextmanager
def _or_stop(stop: Callable[[], object]) -> Iterator[None]:
    """Stop what was started if the block fails: without its record, no command would find it."""
    try:
        yield
    except BaseException:
        stop()
        raise


def _wait(
    run: RunDir, job: str, output: Output, is_over: Callable[[], bool], stop: Callable[[], object]
) -> int:
    """Show a run's output until it is over; Ctrl-C asks it to stop, and again does not wait."""
    try:
        try:
            follow(output, is_over)
        except KeyboardInterrupt:
            stop()
            print("\nasked the run to save and stop; Ctrl-C again does not wait", file=sys.stderr)
            follow(output, is_over)
    except KeyboardInterrupt:
        status, cancel = (_command(name, run) for name in ("status", "cancel"))
        print(f"\nthe run is still stopping; see {status}, or end it: {cancel}", file=sys.stderr)
        return 128 + signal.SIGINT
    return _exit_code(run, [job])


def _prepare_environment(job: Job) -> None:
    """Set the environment that the job inherits."""
    executors.clear_inherited_environment()
    if job.python and Path(job.python[0]).is_absolute():  # not a container's
        python.activate(job.python[0], os.environ)


def _submit(submission: Submission, job: Job) -> str:
    job_id = executors.Slurm(submission.run.job, render(job)).start()
    with _or_stop(lambda: slurm.tell("scancel", job_id)):
        _record(submission, job_id)
    return job_id


def _on_this_machine(submission: Submission) -> int:
    run, job = submission.run, submission.job
    is_array = "array" in job.options
    if submission.later:
        raise RefusedError("--chain needs Slurm, and this machine has no sbatch")
    if job.setup or any(word.startswith("--teardown=") for word in job.batch):
        note("a profile's modules, environment and setup, and --teardown, need Slurm; left out")
    needed = sum(group.nodes * group.gpus for group in job.all_groups)
    visible = len(visible_gpus(os.environ))
    minutes = slurm.seconds(job.time) / 60 if job.time else None
    if needed > visible:
        seen = f"{visible} are visible on this machine"
        raise RefusedError(f"--gpus-per-node: {_nodes(job)} would need {needed} GPUs, and {seen}")
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
    what = "an array of runs" if is_array else _nodes(job)
    print(f"submitted:     process {process.job_id}, {what} on this machine")
    _say_where(run, is_array)
    if not submission.wait:
        return 0
    paths = [local_output(run.job, process.job_id, node) for node in range(job.nodes)]

    def cancel() -> None:
        with contextlib.suppress(OSError):  # else the run counts as failed if its script does not
            Cancellation([process.job_id], time.time()).append(run.path)  # stop in order
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process.job_id), signal.SIGTERM)

    return _wait(run, process.job_id, Output(paths, is_local=True), process.done, cancel)


def _array(job: Job, run: RunDir, gpus: int, minutes: float | None) -> tuple[str, ...]:
    """Return what runs the tasks of an array on this machine."""
    cells = [word for word in job.command if word.startswith("--cells=")]
    words = [f"--run-dir={run.path}", *cells, f"--tasks={job.options['array']}"]
    words += [f"--nodes={job.nodes}", f"--gpus={gpus}", f"--cpus={job.cpus_per_task * job.nodes}"]
    words += [f"--minutes={minutes}"] if minutes else []
    return (*command("array"), *words, "--", *job.command)


def _nodes(job: Job) -> str:
    return "1 node" if job.nodes == 1 else f"{job.nodes} nodes"


@contextlib.contextmanager
def _prepared(submission: Submission) -> Iterator[None]:
    """Create the run directory with code and recipe; remove a new one if starting fails."""
    run, is_new = submission.run, False
    try:
        is_new = run.create()
        if submission.is_new and not is_new:
            raise TakenError(f"another submission has just created run {run.name}")
        run.job.mkdir(exist_ok=True)
        with open_lines(run.path / SubmissionRecord.FILE) as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)  # until the job is recorded
            known = SubmissionRecord.read(run.path)
            if len(known) != submission.before or not run.job.exists():
                is_new = False  # it is the other's by now
                raise TakenError(f"another submission of run {run.name} has just come first")
            _write_job(submission)
            if submission.resume:
                run.forget_verdict()  # supervisors skip a run whose verdict is `done`
            if not is_new:
                whose = "the code that it has" if submission.code is None else "the current code"
                note(f"run {run.name} exists: it continues, with {whose}")
            yield
    except BaseException as error:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise RefusedError(_cannot_be_written(run, error)) from None
        raise


def _cannot_be_written(run: RunDir, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename}: {error.strerror}"
    # The error may name the file that was read.
    place = os.statvfs(next(path for path in run.path.parents if path.exists()))
    left = f"{size(place.f_bavail * place.f_frsize)} and {place.f_favail:,} inodes"
    return (
        f"{run.path}: {error.strerror}: {run.path.parent} has {left} left, and nothing of the run "
        "is kept; free some there, or choose another --root"
    )


def _write_job(submission: Submission) -> None:
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
        _copy_psutil(run.launcher)
    for name, text in submission.files.items():
        write_atomic(run.job / name, text)
    job = submission.job
    own = (str(run.path), job.nodes, job.is_training, job.spares, job.min_nodes)
    JobRecord(*own, more=asdict(job)).write(run.path)
    installed = {f"{package.name}=={package.version}\n" for package in distributions()}
    write_atomic(run.job / "packages.txt", "".join(sorted(installed)))


def _copy_psutil(target: Path) -> None:
    """Copy the one package that supervisors need, for a Python that may not have it."""
    import psutil

    source, ignore = Path(psutil.__file__).parent, shutil.ignore_patterns("tests")
    # Its compiled part works with every Python from 3.6 on.
    shutil.copytree(source, target / source.name, ignore=ignore, dirs_exist_ok=True)


def _record(submission: Submission, job_id: str) -> None:
    versions = {"python": sys.version.split()[0]}
    for package in ("torch", "torchvision", "submitit", "pydantic"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    record = SubmissionRecord(job_id, time.time(), list(submission.argv), str(Path.cwd()), versions)
    record.append(submission.run.path)


def _say_where(run: RunDir, is_array: bool = False) -> None:
    # The tasks of an array are separate runs, each with its own logs.
    follow_it = _command("watch", run) if is_array else _command("logs", run, "--follow")
    print(f"run directory: {run.path}\nfollow it:     {follow_it}")
    print(f"end it:        {_command('cancel', run)}", flush=True)


def _command(command: str, run: RunDir, *options: str) -> str:
    """Return a rollcall command about a run, as the user can type it in this directory."""
    return shlex.join([*_rollcall(), command, *options, find.typed(run)])


def _rollcall() -> list[str]:
    """Return the words that run `rollcall` in a shell in this directory."""
    if not IS_CHECKOUT:
        return ["rollcall"]
    if "ROLLCALL_TORCH" in os.environ:  # set by env/run
        # `rollcall network` and `accept` change the directory; PWD is the shell's
        is_here = Path.cwd() == ROOT == Path(os.environ.get("PWD", ""))
        return ["./env/run" if is_here else f"{ROOT}/env/run", "--quiet", "rollcall"]
    return [sys.executable, f"{ROOT}/env/bin/rollcall"]


def _exit_code(run: RunDir, jobs: Sequence[str]) -> int:
    """Return the exit code of the last attempt in these jobs; a job may make no attempt."""
    codes = [code for job_id in jobs if (code := exit_code(run, job_id)) is not None]
    if not codes:
        print(f"rollcall: error: job {jobs[-1]} ended before the run ended", file=sys.stderr)
        return 1
    verdict = run.read_verdict()
    if verdict is None or verdict.state != "failed":
        return codes[-1]
    first = root_cause.of_newest(run).failure  # on the first node, ranks may have lost their peers
    return first.exit_code if first else codes[-1]
