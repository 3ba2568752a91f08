"""Rules about the programs that a script starts and the signals that reach them."""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import Path

from rollcall.launch.lint.script import Directive, Finding, Launch, Script
from rollcall.launch.lint.shell import Command, expanded
from rollcall.launch.scheduler import cluster, gpus

TRAINERS = ("torchrun", "accelerate", "deepspeed")
TORCHRUN_FLAGS = ("--standalone", "--module", "--no-python", "--no_python", "--run-path")
"""Options of torchrun without a value."""
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
SIGNAL_NUMBERS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}


def rank_in_batch_shell(script: Script) -> Iterator[Finding]:
    """SLURM_NODEID, SLURM_PROCID or SLURM_LOCALID, read in the batch shell, where they are 0."""
    if not script.directives or _starts_itself(script):
        return
    names = re.compile(r"\$\{?(SLURM_(?:NODEID|PROCID|LOCALID))\b")
    for command in script.commands:
        places = [(word.line, expanded(word.raw)) for word in command.words]
        for line, text in [*places, (command.line, command.filled_in)]:
            match = names.search(text)
            if match and not (match[1] == "SLURM_NODEID" and script.value("nodes") == "1"):
                yield Finding(
                    line + text[: match.start()].count("\n"),
                    f"the batch shell expands {match[1]} here, where it is always 0",
                    f"expand it in the task: srun bash -c '... ${match[1]} ...', in single quotes",
                )


def _starts_itself(script: Script) -> bool:
    """Return whether srun runs the script itself, or a function of it, on the nodes."""
    own = re.compile(rf"\$0|BASH_SOURCE|{re.escape(script.path.name)}")
    words = [tuple(word.raw for word in command.words[:2]) for command in script.commands]
    started = (word for step in script.steps() for word in step.program)
    return ("export", "-f") in words or any(map(own.search, started))


def wrapper_without_exec(script: Script) -> Iterator[Finding]:
    """A shell that waits for the training instead of replacing itself with it (exec)."""
    for launch in script.steps():
        if (inner := script.inner(launch)) is not None:
            # A shell with a single command replaces itself with it.
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
    "this shell stays the training's parent: Slurm signals only the shell, which dies, and the "
    "training is killed before it can save"
)


def _waiting(script: Script, commands: Sequence[Command]) -> Launch | None:
    launches = list(script.launches(list(commands)))
    for launch in launches:
        traps = launch.program[0] == "trap" and launch.program[1:2] != ("",)
        if traps or launch.replaces_shell:
            return None
    return next((launch for launch in launches if _trains(launch.program)), None)


def _visible_wrapper(script: Script, word: str) -> Script | None:
    for path in (Path(word), script.path.parent / word):
        if word.endswith(".sh") and path.is_file() and os.access(path, os.R_OK):
            return Script(path, path.read_text(errors="replace"))
    return None


def signal_to_nobody(script: Script) -> Iterator[Finding]:
    """A `--signal` that no process handles."""
    directive, to_batch, name = _signal(script)
    launches = list(script.launches())
    starts = [launch for launch in launches if launch.step is not None or _trains(launch.program)]
    if directive is None or not starts:
        return  # a sourced file may start the training and set the trap
    trapped = any(
        launch.program[0] == "trap" and name in [_plain_signal(word) for word in launch.program[2:]]
        for launch in launches
    )
    wait_for_it = "use exec srun; or start it with &, wait for it in a loop, and set a trap that "
    wait_for_it += f"forwards the signal: kill -{name} to srun"
    if not to_batch and trapped and name != "TERM":  # which Slurm sends at the time limit anyway
        reason = "without B: Slurm signals only the steps, so the trap of this script never runs"
        yield Finding(directive.line, reason, f"write --signal=B:{directive.value}; {wait_for_it}")
    elif not to_batch and all(launch.step is None for launch in starts):
        reason = "without B: Slurm signals only the steps, and this script starts none with srun"
        yield Finding(directive.line, reason, "start the training with srun")
    elif to_batch and not any(launch.replaces_shell for launch in starts):
        if not trapped:
            reason = "B: signals only this shell, which has no trap: it dies and the job ends"
            yield Finding(directive.line, reason, wait_for_it)
        elif all(launch.end != "&" for launch in starts):
            reason = "bash runs the trap only after the foreground command has ended"
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
            reason = f"production clusters send {name} only to torchrun, which dies: its ranks are "
            reason += "killed before they can save"
            handle = f"--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIG{name}"
            yield Finding(directive.line, reason, f"start torchrun with {handle}")


def _signal(script: Script) -> tuple[Directive | None, bool, str]:
    """Return the directive, whether it is for the batch shell, and the signal without SIG."""
    directive = script.option("signal")
    flags, _, rest = (directive.value if directive else "").rpartition(":")
    return directive, "B" in flags, _plain_signal(rest.partition("@")[0])


def _plain_signal(word: str) -> str:
    return SIGNAL_NUMBERS.get(word, word.upper().removeprefix("SIG"))


def fixed_node_count(script: Script) -> Iterator[Finding]:
    """A number of nodes for torchrun that can contradict sbatch's."""
    for launch, words in _torchruns(script):
        count = _option(words, "nnodes") or "1"
        if (_number(count) or 0) > 1:
            reason = f"--nnodes {count} waits forever if the job is submitted with another --nodes"
            yield Finding(launch.line, reason, 'write --nnodes="$SLURM_NNODES"')


def fixed_port(script: Script) -> Iterator[Finding]:
    """A port that two jobs on one node would share."""
    if _takes_whole_nodes(script):
        return
    fix = "derive it from the job: $((20000 + SLURM_JOB_ID % 10000))"
    found = {word.raw: word.line for word in [*script.assigned("MASTER_PORT")][::-1]}
    for launch, words in (*_torchruns(script), *_programs(script, ("accelerate", "deepspeed"))):
        endpoint = _option(words, "rdzv-endpoint") or ""
        port = _option(words, "master-port") or _option(words, "main-process-port")
        found.setdefault(port or endpoint.rpartition(":")[2], launch.line)
    for port, line in found.items():
        if _number(port):
            reason = f"port {port} is in use if another job of this script runs on the same node"
            yield Finding(line, reason, fix)


def _takes_whole_nodes(script: Script) -> bool:
    """Whether no other job can run on the nodes, or hardly on any cluster."""
    on_node = _gpus_per_node(script) or 0
    numbers = (_number(script.value(name)) for name in ("ntasks-per-node", "cpus-per-task"))
    cpus = math.prod(filter(None, numbers))
    is_all = script.option("exclusive") is not None or script.value("mem") == "0"
    return is_all or on_node >= 8 or (on_node >= 4 and cpus >= 32)


def fixed_rendezvous_id(script: Script) -> Iterator[Finding]:
    """A rendezvous id that two jobs would share."""
    for launch, words in _torchruns(script):
        name = _option(words, "rdzv-id")
        if name and not re.search(r"[$`]", name):
            reason = f"two jobs with the rendezvous id '{name}' can meet in one store and mix"
            yield Finding(launch.line, reason, 'write --rdzv-id="$SLURM_JOB_ID"')


def pipe_hides_failure(script: Script) -> Iterator[Finding]:
    """A training whose exit code is replaced by a pipe's."""
    if any("pipefail" in word.raw for command in script.commands for word in command.words):
        return
    if "PIPESTATUS" in script.text or "pipefail" in (script.lines or [""])[0]:
        return
    for launch in script.launches():
        if launch.end in ("|", "|&") and _starts_training(script, launch):
            reason = "the exit code is that of the pipe's last command: a failed training COMPLETED"
            yield Finding(launch.line, reason, "write set -o pipefail at the top of the script")


def tasks_mismatch(script: Script) -> Iterator[Finding]:
    """Several torchruns per node, or a number of ranks that differs from the GPUs."""
    on_node = _gpus_per_node(script)
    for launch, words in _torchruns(script):
        tasks = _tasks_per_node(script, launch) if launch.step is not None else None
        ranks = _number(_option(words, "nproc-per-node") or "")
        if tasks is not None and tasks > 1:
            reason = f"srun starts {tasks} torchruns on each node, and each one starts all ranks"
            yield Finding(launch.line, reason, "add --ntasks-per-node=1, here or in #SBATCH")
        elif ranks is not None and on_node is not None and ranks != on_node:
            reason = f"torchrun starts {ranks} ranks on a node with {on_node} GPUs in this job"
            yield Finding(launch.line, reason, f"write --nproc-per-node={on_node}")


def torchrun_without_srun(script: Script) -> Iterator[Finding]:
    """A job with several nodes whose torchrun starts only on the first node."""
    for launch, words in _torchruns(script):
        nodes = _nodes(script, launch)
        direct = launch.program[0].startswith("python") or launch.program[0] in TRAINERS
        if launch.step is None and nodes > 1 and direct and words:
            reason = f"the batch shell runs only on the first of {nodes} nodes: the others idle"
            yield Finding(launch.line, reason, "start it with srun --ntasks-per-node=1")


def srun_without_cpus(script: Script) -> Iterator[Finding]:
    """An srun without --cpus-per-task in a job that has it, for Slurm 22.05 to 23.02."""
    if script.value("cpus-per-task") in ("", "1") or "SRUN_CPUS_PER_TASK" in script.text:
        return
    if not (22, 5) <= (cluster.version() or (0, 0)) < (23, 11):
        return
    for launch in script.steps():
        knows = {"$", "cpus-per-task"} & {*(launch.step or {})}
        if _starts_training(script, launch) and not knows:
            reason = "srun of Slurm 22.05 to 23.02 does not take --cpus-per-task from sbatch: the "
            reason += "task gets one CPU"
            yield Finding(launch.line, reason, 'write srun --cpus-per-task="$SLURM_CPUS_PER_TASK"')


def missing_node_count(script: Script) -> Iterator[Finding]:
    """A torchrun on several nodes without `--nnodes`: each node trains alone."""
    if re.search(r"\bPET_NNODES\b", script.text):
        return
    for launch, words in _torchruns(script):
        nodes = _nodes(script, launch)
        options = list(takewhile(lambda word: not word.endswith(".py"), words))
        unknown = any(  # a variable that is no option's value may have it
            word.startswith("$")
            and ("=" in before or before in TORCHRUN_FLAGS or not before.startswith("--"))
            for before, word in pairwise(("", *options))
        )
        if launch.step is None or nodes < 2 or unknown or _option(words, "nnodes") is not None:
            continue
        reason = f"without --nnodes, torchrun on each of {nodes} nodes trains alone"
        yield Finding(launch.line, reason, 'write --nnodes="$SLURM_NNODES", and how they meet')


def local_address(script: Script) -> Iterator[Finding]:
    """A meeting place on localhost in a job with several nodes."""
    steps = [launch for launch in script.steps() if _starts_training(script, launch)]
    if not any(_nodes(script, launch) > 1 for launch in steps):
        return
    fix = 'write $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    reason = "on several nodes, {} is another address on each: the ranks cannot meet"
    local = ("localhost", "127.0.0.1")
    if script.expand("$MASTER_ADDR") in local:  # the last value
        for word in script.assigned("MASTER_ADDR"):
            if word.raw in local:
                yield Finding(word.line, reason.format(f"MASTER_ADDR={word.raw}"), fix)
    for launch, words in _torchruns(script):
        for option in ("master-addr", "rdzv-endpoint"):
            value = _option(words, option) or ""
            if _nodes(script, launch) > 1 and value.partition(":")[0] in local:
                yield Finding(launch.line, reason.format(f"--{option} {value}"), fix)


def visible_devices(script: Script) -> Iterator[Finding]:
    """GPUs in CUDA_VISIBLE_DEVICES that the job does not request."""
    on_node = _gpus_per_node(script)
    for word in script.assigned("CUDA_VISIBLE_DEVICES"):
        numbers = [_number(part) for part in word.raw.split(",")]
        if on_node and None not in numbers and max(filter(None, numbers), default=0) >= on_node:
            reason = f"CUDA_VISIBLE_DEVICES={word.raw}, but the job has {on_node} GPUs on a node, "
            reason += "numbered from 0"
            fix = "remove it: Slurm sets it to the job's GPUs; or request as many"
            yield Finding(word.line, reason, fix)


def shared_port(script: Script) -> Iterator[Finding]:
    """Several torchruns at once on a node that use the same port."""
    seen: dict[str, int] = {}
    for launch, words in _torchruns(script):
        unknown = any(word.startswith("$") for word in words)
        apart = {"--standalone", "--rdzv-endpoint", "--rdzv_endpoint"}
        is_apart = any(word.partition("=")[0] in apart for word in words)
        if launch.end != "&" or launch.step is not None or unknown or is_apart:
            continue
        port = _option(words, "master-port") or "29500"
        if port in seen:
            reason = f"port {port} is in use by the torchrun of line {seen[port]}"
            yield Finding(launch.line, reason, "start each with --standalone, or its own port")
        seen.setdefault(port, launch.line)


def hidden_exit_code(script: Script) -> Iterator[Finding]:
    """A later command that replaces the exit code of a failed training."""
    if re.search(r"\$\?|\berrexit\b|\bERR\b|PIPESTATUS|^#!.*\s-\w*e", script.text):
        return
    launches = [launch for launch in script.launches() if launch.program[0] not in _CLOSES]
    if any(_sees_exit_codes(launch) for launch in launches):
        return
    runs = [_starts_training(script, each) and _runs(each.program) for each in launches]
    if True not in runs:
        return
    place = len(runs) - runs[::-1].index(True)
    last, later = launches[place - 1], launches[place:]
    if last.replaces_shell:
        return
    tells = all(_TELLS.fullmatch(each.program[0]) for each in later)
    if last.end == "&":
        waits = [each for each in later if each.program[0] == "wait"]
        if waits and len(waits[-1].program) == 1 and waits[-1] == later[-1]:
            reason = "wait without a process id returns 0: a failed training is COMPLETED"
            yield Finding(waits[-1].line, reason, "write wait for each process id: wait $!")
    elif later and tells and last.end in ("\n", ";"):
        reason = f"the exit code of the job is that of {later[-1].program[0]} (line "
        reason += f"{later[-1].line}): a failed training is COMPLETED"
        yield Finding(last.line, reason, "write set -e at the top of the script")


_CLOSES = ("fi", "done", "}", "esac", ";;", "else")
"""Words that end a part of a script; they leave the exit code as it is."""
_TELLS = re.compile(
    r"echo|printf|date|cp|mv|rm|ls|cat|touch|sleep|true|:|set|kill|wait|sync|cd|export|unset|rsync|"
    r"module|deactivate|conda|scontrol|sacct|seff|squeue|nvidia-smi|rocm-smi|dcgmi|hostname"
)
"""Programs after a training whose exit code says nothing about it."""


def _sees_exit_codes(launch: Launch) -> bool:
    """Whether a command makes a script end with the code of one that has failed, or may do so."""
    sets = launch.program[0] == "set" and any(
        re.fullmatch(r"-\w*e\w*", word) for word in launch.program[1:]
    )
    return sets or launch.program[0] in ("exit", "return", "trap", "function", "case")


def _runs(program: Sequence[str]) -> bool:
    """Whether a command certainly runs its program, not only names it."""
    return program[0] not in ("echo", "printf", "which", "type", "pip", "cat", "[", "[[")


def _nodes(script: Script, launch: Launch) -> int:
    """Return the fewest nodes that a launch runs on; 0 if only the job knows."""
    step = launch.step or {}
    if "$" in step:
        return 0
    found = re.match(r"\d+", step.get("nodes") or script.value("nodes"))
    return int(found[0]) if found else 0


def _torchruns(script: Script) -> Iterator[tuple[Launch, list[str]]]:
    """Yield every torchrun: the script's command that starts it, and torchrun's arguments."""
    return _programs(script, ("torchrun", *TORCHRUN_MODULES))


def _programs(script: Script, names: Sequence[str]) -> Iterator[tuple[Launch, list[str]]]:
    """Yield every command that starts one of these programs, and the program's arguments."""
    for launch in script.launches():
        inner = script.inner(launch) or []
        for program in (launch.program, *(each.program for each in script.launches(inner))):
            for index, word in enumerate(program if _runs(program) else ()):
                if word in names or Path(word).name in names:
                    yield launch, list(program[index + 1 :])
                    break


def _option(words: Sequence[str], name: str) -> str | None:
    """Return the value of a torchrun option, which may be written with - or _."""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") == name:
            return value if equals else "".join(words[index + 1 : index + 2])
    return None


_TOOLS = (("pip",), ("venv",), ("virtualenv",), ("ipykernel",), ("jupyter",))
"""Modules of Python that set up an environment."""


def _trains(program: Sequence[str]) -> bool:
    name = Path(program[0]).name
    is_tool = program[1:2] == ("-c",) or (program[1:2] == ("-m",) and program[2:3] in _TOOLS)
    return name in TRAINERS or (name.startswith("python") and not is_tool)


def _starts_training(script: Script, launch: Launch) -> bool:
    if any(_trains(launch.program[index:]) for index in range(min(4, len(launch.program)))):
        return True
    return any(_trains(each.program) for each in script.launches(script.inner(launch) or []))


def _tasks_per_node(script: Script, launch: Launch) -> int | None:
    """Return how many tasks of a step run on each node; None if only the job knows."""
    step = launch.step or {}
    if "$" in step:
        return None
    per_node = step.get("ntasks-per-node")
    if per_node is None and "ntasks" not in step:
        per_node = script.value("ntasks-per-node") or script.value("tasks-per-node")
    if per_node:
        return _number(per_node)
    tasks = _number(step.get("ntasks") or script.value("ntasks"))
    nodes = step.get("nodes") or script.value("nodes") or ("1" if "ntasks" in step else "")
    count = _number(nodes)
    return math.ceil(tasks / count) if tasks and count else None


def _number(text: str) -> int | None:
    """Return a number; None for a variable and everything else that only the job knows."""
    return int(text) if text.isascii() and text.isdecimal() else None


def _gpus_per_node(script: Script) -> int | None:
    option = script.value("gpus-per-node")
    with contextlib.suppress(ValueError):  # a variable, which only the job knows
        return sum(gpus.per_node(option, {"gres": script.value("gres")}).values()) or None
    return None
