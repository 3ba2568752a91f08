"""Rules about what the script starts, and about the signals that shall reach it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.lint.options import SHORT
from launch.lint.script import Directive, Finding, Launch, Script
from launch.lint.shell import Command, expanded

TRAINERS = ("torchrun", "accelerate", "deepspeed")
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
SIGNAL_NUMBERS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}


def rank_in_batch_shell(script: Script) -> Iterator[Finding]:
    """SLURM_NODEID, SLURM_PROCID or SLURM_LOCALID, read in the batch shell, where it is 0."""
    if not script.directives or _starts_itself(script):
        return
    names = re.compile(r"\$\{?(SLURM_(?:NODEID|PROCID|LOCALID))\b")
    for command in script.commands:
        places = [(word.line, expanded(word.raw)) for word in command.words]
        for line, text in [*places, (command.line, command.filled_in)]:
            if match := names.search(text):
                yield Finding(
                    line + text[: match.start()].count("\n"),
                    f"the batch shell fills in {match[1]} here, and in it that is always 0",
                    f"let the task read it: srun bash -c '... ${match[1]} ...', in single quotes",
                )


def _starts_itself(script: Script) -> bool:
    """Whether the script, or a function of it, is also what srun runs on the nodes."""
    own = re.compile(rf"\$0|BASH_SOURCE|{re.escape(script.path.name)}")
    steps = [launch for launch in script.launches() if launch.step is not None]
    words = [tuple(word.raw for word in command.words[:2]) for command in script.commands]
    exported = ("export", "-f") in words
    return exported or any(own.search(word) for step in steps for word in step.program)


def wrapper_without_exec(script: Script) -> Iterator[Finding]:
    """A shell that waits for its training instead of becoming it."""
    for launch in script.launches():
        if launch.step is None:
            continue
        inner = script.inner(launch)
        if inner is not None:
            # A shell that is given a single command becomes it by itself.
            culprit = _waiting(script, inner) if len(inner) > 1 else None
            if culprit:
                yield Finding(culprit.line, _WAITS, f"write exec {culprit.program[0]} ...")
            continue
        for word in launch.program[:2]:
            wrapper = _visible_wrapper(script, word)
            culprit = _waiting(wrapper, wrapper.commands) if wrapper else None
            if wrapper and culprit:
                where = f"line {culprit.line} of {wrapper.path}"
                yield Finding(launch.line, _WAITS, f"write exec before the command in {where}")


_WAITS = (
    "this shell stays above the training: Slurm signals the shell alone, which dies of it, and the "
    "training is killed without having saved"
)


def _waiting(script: Script, commands: Sequence[Command]) -> Launch | None:
    launches = list(script.launches(list(commands)))
    if any(launch.program[0] == "trap" and launch.program[1:2] != ("",) for launch in launches):
        return None
    if any(launch.replaces_shell for launch in launches):
        return None
    return next((launch for launch in launches if _trains(launch.program)), None)


def _visible_wrapper(script: Script, word: str) -> Script | None:
    if not word.endswith(".sh"):
        return None
    for path in (Path(word), script.path.parent / word):
        if path.is_file():
            return Script(path, path.read_text(errors="replace"))
    return None


def signal_to_nobody(script: Script) -> Iterator[Finding]:
    """A `--signal` that reaches nobody who acts on it."""
    directive, to_batch, name = _signal(script)
    if directive is None or not script.commands:
        return
    launches = list(script.launches())
    starts = [launch for launch in launches if launch.step is not None or _trains(launch.program)]
    trapped = any(
        launch.program[0] == "trap" and name in [_plain_signal(word) for word in launch.program[2:]]
        for launch in launches
    )
    if not starts:
        return  # perhaps a file that is sourced starts the training, and has the trap
    wait_for_it = "exec srun; or start it with & and wait for it in a loop, with a trap that "
    wait_for_it += f"passes the signal on: kill -{name} to srun"
    if not to_batch and trapped and name != "TERM":  # which comes at the time limit anyway
        reason = "without B: Slurm signals the steps only, so the trap of this script never runs"
        yield Finding(directive.line, reason, f"write --signal=B:{directive.value}; {wait_for_it}")
    elif not to_batch and all(launch.step is None for launch in starts):
        reason = "without B: Slurm signals the steps only, and this script starts none: no srun"
        yield Finding(directive.line, reason, "start the training with srun")
    elif to_batch and not any(launch.replaces_shell for launch in starts):
        if not trapped:
            reason = "B: signals this shell alone, which has no trap: it dies and the job ends"
            yield Finding(directive.line, reason, wait_for_it)
        elif all(launch.end != "&" for launch in starts):
            reason = "bash runs the trap only when the command in the foreground has ended"
            yield Finding(directive.line, reason, wait_for_it)


def signal_kills_torchrun(script: Script) -> Iterator[Finding]:
    """SIGUSR1 or SIGUSR2 for a torchrun that does not handle it."""
    directive, to_batch, name = _signal(script)
    if directive is None or name not in ("USR1", "USR2"):
        return
    for launch, words in _torchruns(script):
        handled = _option(words, "signals-to-handle") or ""
        if "TORCHELASTIC_SIGNALS_TO_HANDLE" in script.text or name in handled:
            continue
        ignored = re.search(r"\btrap\b", " ".join(launch.program))
        if launch.step is not None and (launch.replaces_shell or not to_batch) and not ignored:
            reason = f"production clusters send {name} to torchrun alone, which dies of it: its "
            reason += "ranks are killed without having saved"
            handle = f"--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIG{name}"
            yield Finding(directive.line, reason, f"start torchrun with {handle}")


def _signal(script: Script) -> tuple[Directive | None, bool, str]:
    """The directive, whether it is for the batch shell, and the signal's name without SIG."""
    directive = script.option("signal")
    flags, _, rest = (directive.value if directive else "").rpartition(":")
    return directive, "B" in flags, _plain_signal(rest.partition("@")[0])


def _plain_signal(word: str) -> str:
    return SIGNAL_NUMBERS.get(word, word.upper().removeprefix("SIG"))


def fixed_node_count(script: Script) -> Iterator[Finding]:
    """A number of nodes given to torchrun that sbatch's own can contradict."""
    for launch, words in _torchruns(script):
        count = _option(words, "nnodes") or "1"
        if count.isdigit() and int(count) > 1:
            reason = (
                f"--nnodes {count} waits in vain when the job is submitted with another --nodes"
            )
            yield Finding(launch.line, reason, 'write --nnodes="$SLURM_NNODES"')


def fixed_port(script: Script) -> Iterator[Finding]:
    """A port that two jobs on one node would share."""
    if script.option("exclusive"):
        return
    cure = "derive it from the job: $((20000 + SLURM_JOB_ID % 10000))"
    seen = set()
    for command in script.commands:
        for word in command.words:
            if match := re.fullmatch(r"MASTER_PORT=[\"']?([1-9]\d*)[\"']?", word.raw):
                seen.add(match[1])
                yield Finding(word.line, _port_reason(match[1]), cure)
    for launch, words in _torchruns(script):
        endpoint = _option(words, "rdzv-endpoint") or ""
        port = _option(words, "master-port") or endpoint.rpartition(":")[2]
        if re.fullmatch(r"[1-9]\d*", port) and port not in seen:
            yield Finding(launch.line, _port_reason(port), cure)


def _port_reason(port: str) -> str:
    return f"port {port} is taken when another job of this script runs on the same node"


def fixed_rendezvous_id(script: Script) -> Iterator[Finding]:
    """A rendezvous id that two jobs would share."""
    for launch, words in _torchruns(script):
        name = _option(words, "rdzv-id")
        if name and not re.search(r"[$`]", name):
            reason = f"two jobs with the rendezvous id '{name}' can meet in one store and mix"
            yield Finding(launch.line, reason, 'write --rdzv-id="$SLURM_JOB_ID"')


def pipe_hides_failure(script: Script) -> Iterator[Finding]:
    """A training whose exit code a pipe replaces."""
    if any("pipefail" in word.raw for command in script.commands for word in command.words):
        return
    if "PIPESTATUS" in script.text or "pipefail" in (script.lines or [""])[0]:
        return
    for launch in script.launches():
        if launch.end in ("|", "|&") and _starts_training(script, launch):
            reason = (
                "the job's exit code is that of the pipe's last command: a failure is COMPLETED"
            )
            yield Finding(launch.line, reason, "write set -o pipefail at the top of the script")


def tasks_mismatch(script: Script) -> Iterator[Finding]:
    """Several torchruns per node, or another number of ranks than GPUs."""
    gpus = _gpus_per_node(script)
    for launch, words in _torchruns(script):
        tasks = _tasks_per_node(script, launch) if launch.step is not None else None
        ranks = _option(words, "nproc-per-node") or ""
        if tasks is not None and tasks > 1:
            reason = f"srun starts {tasks} torchruns on each node, and each starts all of its ranks"
            yield Finding(launch.line, reason, "say --ntasks-per-node=1, here or in #SBATCH")
        elif ranks.isdigit() and gpus is not None and int(ranks) != gpus:
            reason = f"torchrun starts {ranks} ranks on a node that has {gpus} GPUs in this job"
            yield Finding(launch.line, reason, f"say --nproc-per-node={gpus}")


def torchrun_without_srun(script: Script) -> Iterator[Finding]:
    """A job of several nodes whose torchrun starts on the first one alone."""
    nodes = re.match(r"\d+", script.value("nodes"))
    if nodes is None or int(nodes[0]) < 2:
        return
    for launch, words in _torchruns(script):
        direct = launch.program[0].startswith("python") or launch.program[0] in TRAINERS
        if launch.step is None and direct and words:
            reason = f"the batch shell runs on the first of {nodes[0]} nodes: the others stay idle"
            yield Finding(launch.line, reason, "start it with srun --ntasks-per-node=1")


def srun_without_cpus(script: Script) -> Iterator[Finding]:
    """An srun that does not say --cpus-per-task where sbatch does."""
    if script.value("cpus-per-task") in ("", "1") or "SRUN_CPUS_PER_TASK" in script.text:
        return
    for launch in script.launches():
        if launch.step is None or not _starts_training(script, launch):
            continue
        unknown = any(word.startswith("$") for word in launch.step)
        if not unknown and "cpus-per-task" not in _step_options(launch):
            reason = "srun of Slurm 22.05 to 23.02 does not take --cpus-per-task from sbatch: the "
            reason += "task gets one CPU"
            cure = 'write srun --cpus-per-task="$SLURM_CPUS_PER_TASK"'
            yield Finding(launch.line, reason, cure)


def _torchruns(script: Script) -> Iterator[tuple[Launch, list[str]]]:
    """Every torchrun: the batch script's command that starts it, and torchrun's words."""
    for launch in script.launches():
        inner = script.inner(launch) or []
        for program in (launch.program, *(each.program for each in script.launches(inner))):
            if program[0] in ("echo", "printf", "which", "type", "pip"):
                continue
            for index, word in enumerate(program):
                if Path(word).name == "torchrun" or word in TORCHRUN_MODULES:
                    yield launch, list(program[index + 1 :])
                    break


def _option(words: Sequence[str], name: str) -> str | None:
    """The value of an option of torchrun, which spells its options with - or _."""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") == name:
            return value if equals else "".join(words[index + 1 : index + 2])
    return None


def _trains(program: Sequence[str]) -> bool:
    name = Path(program[0]).name
    return name in TRAINERS or (name.startswith("python") and "-c" not in program[1:2])


def _starts_training(script: Script, launch: Launch) -> bool:
    if any(_trains(launch.program[index:]) for index in range(min(4, len(launch.program)))):
        return True
    inner = script.launches(script.inner(launch) or [])
    return any(_trains(each.program) for each in inner)


def _step_options(launch: Launch) -> dict[str, str]:
    options = {}
    for word in launch.step or ():
        name, _, value = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            name, value = SHORT.get(name[:1], name[:1]), value or name[1:]
        options[name] = value
    return options


def _tasks_per_node(script: Script, launch: Launch) -> int | None:
    """How many tasks of a step run on each node, None if only the job will know."""
    step = _step_options(launch)
    if any(name.startswith("$") for name in step):
        return None
    per_node = step.get("ntasks-per-node")
    if per_node is None and "ntasks" not in step:
        per_node = script.value("ntasks-per-node") or script.value("tasks-per-node")
    if per_node:
        return int(per_node) if per_node.isdigit() else None
    tasks = step.get("ntasks") or script.value("ntasks")
    nodes = step.get("nodes") or script.value("nodes") or ("1" if "ntasks" in step else "")
    if tasks.isdigit() and nodes.isdigit():
        return -(-int(tasks) // int(nodes))
    return None


def _gpus_per_node(script: Script) -> int | None:
    value = script.value("gpus-per-node")
    for resource in script.value("gres").split(","):
        if resource.startswith("gpu:"):
            value = resource
    count = value.rpartition(":")[2]
    return int(count) if count.isdigit() else None
