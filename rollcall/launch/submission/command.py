"""`rollcall submit`: start a run on Slurm or on this machine.

A dry run ends in this module, so nothing here imports submitit, psutil or torch.
"""

import shlex
from collections.abc import Sequence

from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.job import needs_slurm, options, render, render_step
from rollcall.launch.submission import layers
from rollcall.launch.submission.options import CommandLine
from rollcall.launch.submission.plan import SubmissionPlan, TakenError, plan
from rollcall.messages.text import listed, note, table


def main(argv: Sequence[str]) -> int:
    """Do what the command line asks for; return the exit code."""
    return begin(*layers.read(argv), argv)


def begin(line: CommandLine, setup: tuple[str, ...], argv: Sequence[str]) -> int:
    """Do what a parsed command line asks for; return the exit code."""
    local = is_local(line)
    if line.own.preflight and (local or line.own.in_allocation):
        note("--preflight has no effect here, because there is no other node to use; try --doctor")
    while True:
        try:
            planned = plan(line, argv, setup)
            if line.own.doctor:
                from rollcall.launch.doctor import nodes  # here: few command lines need them
                from rollcall.launch.submission import executors, preflight

                if not local:
                    preflight.check_root(planned.job, planned.run.path.parent)
                executors.clear_inherited_environment()
                return nodes.report_on(planned.job, planned.run.path.parent, local, line.own.json)
            return carry_out(planned, local, line.own.dry_run)
        except TakenError:
            if line.own.in_allocation:  # whose variables are no longer set
                raise


def is_local(line: CommandLine) -> bool:
    """Return True if a run starts on this machine; say so if nobody asked for that."""
    if not (line.own.local or line.own.dry_run or line.own.in_allocation or slurm.is_available()):
        note("this machine has no Slurm cluster, so the run starts here")
    return line.own.local or not slurm.is_available()


def carry_out(submission: SubmissionPlan, local: bool, dry_run: bool) -> int:
    """Start a planned submission, or only show it; return the exit code."""
    if dry_run:
        show(submission, local)
        return 0
    from rollcall.launch.runs import exit_code  # here: a dry run needs neither
    from rollcall.launch.submission import start

    try:
        return start.start(submission, local)
    except KeyboardInterrupt:
        if start.tell_of_interrupt(submission):
            return exit_code.CANCELLED
        raise


def show(submission: SubmissionPlan, local: bool) -> None:
    """Print what a submission would do."""
    job = submission.job
    if local:
        print(f"cd {shlex.quote(job.directory)}\n{shlex.join(job.command)}\n")
        print(f"# on this machine, {job.nodes} times: once per simulated node")
        if left_out := needs_slurm(job):
            print(f"# without Slurm, left out: {listed(left_out, 9)}")
    elif job.allocation:
        print(render_step(job))
    else:
        print(render(job))
        names = [option.partition("=")[0] for option in options(job)]
        rows = [(f"# --{name}", submission.origins.get(name, "default")) for name in names]
        print(*table([("# option", "from"), *rows]), sep="\n")
    for remark in submission.remarks:
        print(f"# {remark}")
    for modules in submission.modules:
        print(f"# modules: {modules.describe()}")
    code = submission.code.describe() if submission.code else "the run keeps the code that it has"
    print(f"# run directory: {submission.run.path}\n# code: {code}")
