"""Rules about the programs that a script starts and the signals that reach them."""

import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from rollcall.launch.scheduler import cluster
from rollcall.system.files import read_whole
from rollcall.tools.lint.job import Job, number
from rollcall.tools.lint.model import LAUNCHERS, Launch, Training
from rollcall.tools.lint.script import Directive, Finding, Rule, Script
from rollcall.tools.lint.shell import expanded

SIGNAL_NUMBERS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}


def rank_in_batch_shell(script: Script) -> Iterator[Finding]:
    """SLURM_NODEID, SLURM_PROCID or SLURM_LOCALID, read in the batch shell, where they are 0."""
    job = Job(script)
    if not script.directives or _starts_itself(script) or (job.nodes, job.tasks_per_node) == (1, 1):
        return
    names = re.compile(r"\$\{?(SLURM_(?:NODEID|PROCID|LOCALID))\b")
    for line, text in _expanded(script):
        match = names.search(text)
        if match and not (match[1] == "SLURM_NODEID" and job.nodes == 1):
            yield Finding(
                line + text[: match.start()].count("\n"),
                f"the batch shell expands {match[1]} here, where it is always 0",
                f"expand it in the task: srun bash -c '... ${match[1]} ...', in single quotes",
            )


def _expanded(script: Script) -> Iterator[tuple[int, str]]:
    """Yield the texts in which the batch shell expands variables, with their lines."""
    for command in script.commands:
        if command.words and command.words[0].raw in ("echo", "printf"):
            continue  # what is only shown
        yield from ((word.line, expanded(word.raw)) for word in command.words)
        yield command.line, command.filled_in


def _starts_itself(script: Script) -> bool:
    """Return True if srun runs the script itself, or a function of it, on the nodes."""
    names_itself = re.compile(rf"\$0|BASH_SOURCE|{re.escape(script.path.name)}")
    words = [tuple(word.raw for word in command.words[:2]) for command in script.commands]
    started = (word for step in script.steps for word in step.program)
    return ("export", "-f") in words or any(map(names_itself.search, started))


def unset_variable(script: Script) -> Iterator[Finding]:
    """A variable that the script uses and never sets."""
    loads = r"(?m)^\s*(?:source|\.|eval)\s(?!.*(?:activate|bashrc|conda|profile|modules|venv))"
    if not script.directives or re.search(loads, script.text) or _starts_itself(script):
        return
    sets = r"\b(\w+)\+?=|\(\(\s*(\w+)\s*="
    sets += r"|\b(?:for|select|local|declare|unset|getopts \S+|printf -v|export) +(\w+)"
    known = {name for names in re.findall(sets, script.text) for name in names}
    for words in re.findall(r"\b(?:read|mapfile|readarray)\b([^\n;|]*)", script.text):
        known |= set(words.split())
    used: dict[str, int] = {}
    for line, text in _expanded(script):
        text = re.sub(r"`[^`]*`|\$\(.*?awk.*?\)", "", text)
        for name in re.findall(r"\$\{?([A-Za-z_]\w+)", text):
            used.setdefault(name, line)
    for name, line in used.items():
        asks = rf"\$\{{{name}[^}}\w\[]|-[znv]\s+\"?\$?\{{?{name}\b"
        if name in known or re.match("SLURM|.*proxy", name) or re.search(asks, script.text):
            continue
        close = get_close_matches(name, known, 1, 0.85)
        numbered = close and re.sub(r"\d", "", name) == re.sub(r"\d", "", close[0])
        if name.islower() or (close and name.isupper() and not numbered):
            # Another name in capitals may come from the environment.
            fix = f"write ${close[0]}, if that is meant" if close else f"set {name} above"
            yield Finding(line, f"${name} is never set in this script: it is empty here", fix)


def wrapper_without_exec(script: Script) -> Iterator[Finding]:
    """A shell that keeps a `--signal` from the training, because it does not exec it."""
    directive, to_batch, _ = _signal(script)
    if directive is None or to_batch:
        return
    waits = "this shell stays the training's parent: Slurm signals only the shell, which dies, and "
    waits += "the training is killed before it can save"
    for launch in script.steps:
        culprit = _waiting(launch.parts) if len(launch.parts) > 1 else None
        if culprit:  # a shell with a single command replaces itself with it
            yield Finding(culprit.line, waits, f"write exec {culprit.program[0]} ...")
        for word in () if launch.parts else launch.program[:2]:
            for path in (Path(word), script.path.parent / word):
                if word.endswith(".sh") and path.is_file() and os.access(path, os.R_OK):
                    wrapper = Script(path, read_whole(path).decode(errors="replace"))
                    if culprit := _waiting(wrapper.launches):
                        fix = f"write exec before the command in line {culprit.line} of {path}"
                        yield Finding(launch.line, waits, fix)
                    break


def _waiting(inner: Sequence[Launch]) -> Launch | None:
    for launch in inner:
        traps = launch.program[0] == "trap" and launch.program[1:2] != ("",)
        if traps or launch.replaces_shell:
            return None
    return next((launch for launch in inner if launch.training), None)


def signal_to_nobody(script: Script) -> Iterator[Finding]:
    """A `--signal` that no process handles."""
    directive, to_batch, name = _signal(script)
    starts = [launch for launch in script.launches if launch.step is not None or launch.training]
    if directive is None or not starts:
        return  # a sourced file may start the training and set the trap
    trapped = any(
        launch.program[0] == "trap" and name in [_plain_signal(word) for word in launch.program[2:]]
        for launch in script.launches
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
    for launch, training in _trainings(script, "torchrun"):
        handled = training.option("signals-to-handle") or ""
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


def node_count(script: Script) -> Iterator[Finding]:
    """A launcher on several nodes that does not know their number, or another one."""
    if "PET_NNODES" in script.text:
        return
    for launch, training in _trainings(script, *LAUNCHERS):
        nodes, node_text = Job(script, launch).nodes, training.option(*_NODES)
        is_told = node_text is not None or training.hides_options or training.name == "deepspeed"
        count = number(node_text or "")
        gets = f"gets {nodes}" if nodes else "may get another number"
        if count and count != nodes and max(count, nodes) > 1:
            happens = "some idle" if count < nodes else "it waits until it times out"
            reason = f"{training.name} expects {count} nodes and {gets}: {happens}"
        elif nodes > 1 and launch.step is not None and not is_told:
            reason = f"{training.name} is not told that there are {nodes} nodes: each trains alone"
        else:
            continue
        yield Finding(launch.line, reason, 'write --nnodes="$SLURM_NNODES", and how they meet')


_NODES = ("nnodes", "num-machines", "num-nodes")


def fixed_port(script: Script) -> Iterator[Finding]:
    """A port that two jobs, or two trainings of this one, would share on a node."""
    ports: dict[str, int] = {}
    at_once: dict[str, int] = {}
    for launch, training in _trainings(script):
        address, variable = training.option(*_PORTS) or "", launch.value("MASTER_PORT")
        port, line = address.rpartition(":")[2], launch.line
        if training.name == "python":
            port, line = variable.raw, variable.line
        elif launch.end == "&" and launch.step is None and training.name == "torchrun":
            port = port or ("" if "--standalone" in training.arguments else "29500")
            if number(port) and port in at_once and not training.hides_options:
                reason = f"port {port} is in use by the torchrun of line {at_once[port]}"
                yield Finding(line, reason, "start each with --standalone, or its own port")
            at_once.setdefault(port, line)
            port = address.rpartition(":")[2]
        elif port == variable.raw:
            line = variable.line
        ports.setdefault(port, line)
    for port, line in ports.items():
        if number(port) and not Job(script).takes_whole_nodes:
            reason = f"port {port} is in use if another job of this script runs on the same node"
            yield Finding(line, reason, "derive it: $((20000 + SLURM_JOB_ID % 10000))")


_PORTS = ("master-port", "main-process-port", "rdzv-endpoint")


def tasks_mismatch(script: Script) -> Iterator[Finding]:
    """Several launchers per node, each of which starts all ranks."""
    for launch, training in _trainings(script, *LAUNCHERS):
        tasks = Job(script, launch).tasks_per_node
        if launch.step is not None and tasks is not None and tasks > 1:
            reason = f"srun starts {training.name} {tasks} times on each node, and each one starts "
            yield Finding(launch.line, f"{reason}all ranks", "write srun --ntasks-per-node=1")


def gpu_count(script: Script) -> Iterator[Finding]:
    """GPUs that contradict: requested, in CUDA_VISIBLE_DEVICES, and used by a launcher."""
    reported = set()
    at_once = sum(launch.end == "&" for launch, _ in _trainings(script))
    for launch, training in _trainings(script):
        job, value = Job(script, launch), launch.value("CUDA_VISIBLE_DEVICES")
        ids = [index for part in value.raw.split(",") if (index := number(part)) is not None]
        on_node, ranks = job.gpus_per_node, job.ranks_per_node(training)
        if on_node and ids and max(ids) >= on_node and value.line not in reported:
            reported.add(value.line)
            reason = f"CUDA_VISIBLE_DEVICES={value.raw}, but the job has {on_node} GPUs on a node, "
            fix = "remove it: Slurm sets it to the job's GPUs; or request as many"
            yield Finding(value.line, f"{reason}numbered from 0", fix)
            continue
        usable = min(filter(None, (on_node, len(ids))), default=None)
        several = launch.end == "&" and (at_once > 1 or launch.blocks)
        several = several or (launch.step is not None and (job.tasks_per_node or 1) > 1)
        if ranks and usable and ranks != usable and not several and training.name != "python":
            whose = "CUDA_VISIBLE_DEVICES shows" if usable == len(ids) else "the job has"
            happens = f"{ranks - usable} fail" if ranks > usable else f"{usable - ranks} idle"
            reason = f"{training.name} starts {ranks} ranks on a node, where {whose} {usable} GPUs"
            fix = f"start {usable} ranks, or request {ranks} GPUs"
            yield Finding(launch.line, f"{reason}: {happens}", fix)


def without_srun(script: Script) -> Iterator[Finding]:
    """A training that runs once, in the batch shell, in a job with more nodes or tasks."""
    job, programs = Job(script), {Path(launch.program[0]).name for launch in script.launches}
    if programs & _STARTERS or any(
        step.trainings or Path(step.program[0]).name not in _PREPARES for step in script.steps
    ):
        return
    for launch, training in _trainings(script):
        if not training.is_direct or training.option("hostfile", "H", "deepspeed-hostfile"):
            continue
        tasks = job.tasks_per_node or 1
        if job.nodes > 1:
            reason = f"it runs once, on the first of {job.nodes} nodes: the others idle"
            per_node = " --ntasks-per-node=1" if training.name != "python" else ""
            yield Finding(launch.line, reason, f"start it with srun{per_node}")
        elif training.name == "python" and tasks > 1 and tasks == job.gpus_per_node:
            reason = f"it runs once: the other {tasks - 1} tasks, and their GPUs, are never started"
            yield Finding(launch.line, reason, "start it with srun, which runs it in every task")


_STARTERS = {"mpirun", "mpiexec", "mpiexec.hydra", "jsrun", "ssh", "pdsh", "clush", "parallel"}
_STARTERS |= {"ray", "dask", "horovodrun"}
"""Programs that start others on the nodes."""
_PREPARES = {"hostname", "scontrol", "nvidia-smi", "echo", "env", "mkdir", "cp", "rm", "rsync"}
_PREPARES |= {"ls", "date", "ip", "true"}
"""Steps that only ask or prepare something there."""


def srun_without_cpus(script: Script) -> Iterator[Finding]:
    """An srun without --cpus-per-task in a job that has it, for Slurm 22.05 to 23.02."""
    if script.value("cpus-per-task") in ("", "1") or "SRUN_CPUS_PER_TASK" in script.text:
        return
    if not (22, 5) <= (cluster.version() or (0, 0)) < (23, 11):
        return
    for launch in script.steps:
        if launch.trainings and not {"$", "cpus-per-task"} & {*(launch.step or {})}:
            reason = "srun of Slurm 22.05 to 23.02 does not take --cpus-per-task from sbatch: the "
            reason += "task gets one CPU"
            yield Finding(launch.line, reason, 'write srun --cpus-per-task="$SLURM_CPUS_PER_TASK"')


def local_address(script: Script) -> Iterator[Finding]:
    """A meeting place on localhost in a job with several nodes."""
    fix = 'write $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    reason = "on several nodes, {} is another address on each: the ranks cannot meet"
    addresses: dict[int, str] = {}
    for launch, training in _trainings(script):
        if launch.step is None or Job(script, launch).nodes < 2:
            continue
        for option in ("master-addr", "rdzv-endpoint", "main-process-ip"):
            value = training.option(option) or ""
            if value.partition(":")[0] in _LOCAL:
                addresses.setdefault(launch.line, f"--{option} {value}")
        address = launch.value("MASTER_ADDR")
        if address.raw in _LOCAL:
            addresses[address.line] = f"MASTER_ADDR={address.raw}"
    yield from (Finding(line, reason.format(what), fix) for line, what in addresses.items())


_LOCAL = ("localhost", "127.0.0.1")


def rank_by_hand(script: Script) -> Iterator[Finding]:
    """A WORLD_SIZE or rank that the script sets and that is wrong in the tasks."""
    reported = set()
    for launch, _ in _trainings(script, "python"):
        job = Job(script, launch)
        tasks = (job.tasks_per_node or 0) * job.nodes if launch.step is not None else 0
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            word = launch.value(name)
            value = job.evaluate(word.raw)
            wrong = value != tasks if name == "WORLD_SIZE" else tasks > 1
            if value is None or tasks == 0 or not wrong or word.line in reported:
                continue
            reported.add(word.line)
            happens = f"srun starts {tasks} tasks" if name == "WORLD_SIZE" else "in every task"
            right = {"WORLD_SIZE": "SLURM_NTASKS", "RANK": "SLURM_PROCID"}.get(
                name, "SLURM_LOCALID"
            )
            fix = f"write srun bash -c 'export {name}=${right}; exec python ...'"
            yield Finding(word.line, f"{name} is {value}, {happens}: the ranks never meet", fix)


def missing_wait(script: Script) -> Iterator[Finding]:
    """A training in the background for which the script does not wait."""
    stays = re.compile(
        r"wait|sleep|tail|fg|while|exec|source|\.|\$.*|(\S*/)?\w+\.sh|bash|sh|python\S*"
    )
    for index, launch in enumerate(script.launches):
        later = script.launches[index + 1 :]
        kept = [after for after in later if after.end != "&"]
        waits = any(
            a.trainings or a.step is not None or stays.fullmatch(a.program[0]) for a in kept
        )
        if launch.end == "&" and launch.trainings and not waits and "function" not in launch.blocks:
            reason = "the script ends while this runs in the background: Slurm kills it at once"
            yield Finding(launch.line, reason, "write wait $! at the end of the script")


def hidden_exit_code(script: Script) -> Iterator[Finding]:
    """A pipe, `||` or later command that replaces the exit code of a failed training."""
    in_order = [launch for launch in script.launches if "function" not in launch.blocks]
    last: Launch | None = None
    later: list[Launch] = []
    for index, launch in enumerate(in_order):
        if not launch.trainings or launch.is_condition:
            continue
        last, fix = launch, ""
        later = [after for after in in_order[index + 1 :] if not launch.excludes(after)]
        replaced = later[0].program[0] if later else ""
        line = script.lines[later[0].line - 1] if later else ""
        if (
            launch.end in ("|", "|&")
            and not launch.has_pipefail
            and "PIPESTATUS" not in script.text
        ):
            reason, fix = "the pipe's last command sets", "set -o pipefail at the top of the script"
        elif launch.end == "||" and replaced in ("true", ":", "echo") and "exit" not in line:
            reason, fix = f"|| {replaced} replaces", "the command without it"
        if fix:
            yield Finding(launch.line, f"{reason} the exit code: {_COMPLETED}", f"write {fix}")
    below = "\n".join(script.lines[last.line - 1 :]) if last else ""
    if last is None or re.search(r"\$\{?\?|PIPESTATUS|\bif\s+!?\s*wait\b", below):
        return
    if last.replaces_shell or last.end in ("||", "|", "|&") or not all(map(_tells, later)):
        return
    waits = [launch for launch in later if launch.program[0] == "wait"]
    if last.end == "&" and waits and len(waits[-1].program) == 1:
        reason = f"wait without a process id returns 0: {_COMPLETED}"
        yield Finding(waits[-1].line, reason, "write wait for each process id: wait $!")
    elif last.end != "&" and later and not last.sees_failures:
        reason = f"the exit code of the job is that of {later[-1].program[0]} (line "
        reason += f"{later[-1].line}): {_COMPLETED}"
        yield Finding(last.line, reason, "write set -e at the top of the script")


_COMPLETED = "a failed training is COMPLETED"
_TELLS = re.compile(
    r"echo|printf|date|cp|mv|rm|ls|cat|touch|sleep|true|:|set|kill|wait|sync|cd|export|unset|rsync|\[|\[\[|"
    r"module|deactivate|conda|scontrol|sacct|seff|squeue|nvidia-smi|rocm-smi|dcgmi|hostname|mkdir|tar"
)
"""Programs after a training whose exit code says nothing about it."""


def _tells(launch: Launch) -> bool:
    exits_well = launch.program[0] in ("exit", "return") and launch.program[1:2] in ((), ("0",))
    return exits_well or _TELLS.fullmatch(launch.program[0]) is not None


def _trainings(script: Script, *names: str) -> Iterator[tuple[Launch, Training]]:
    """Yield every training, and the command of the batch shell that starts it."""
    for launch in script.launches:
        inside = [part for part in launch.parts if part.training]
        for part in inside or [launch]:
            if part.training and (not names or part.training.name in names):
                yield launch, part.training


RULES: tuple[Rule, ...] = (
    *(rank_in_batch_shell, unset_variable, wrapper_without_exec, signal_to_nobody),
    *(signal_kills_torchrun, node_count, fixed_port, tasks_mismatch, gpu_count, without_srun),
    *(srun_without_cpus, local_address, rank_by_hand, missing_wait, hidden_exit_code),
)
