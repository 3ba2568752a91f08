"""Turn a command line into a submission. Checks everything that it can; writes nothing."""

import hashlib
import json
import os
import re
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollcall.cli import installation
from rollcall.cli.installation import PACKAGED, ROOT, is_training, training_words
from rollcall.config import Config, ConfigError, arguments, mesh, parse
from rollcall.config.read import is_file
from rollcall.launch.frameworks import roles
from rollcall.launch.program import data, find
from rollcall.launch.program.find import SHELL_SCRIPTS, UserCode
from rollcall.launch.scheduler import cluster, slurm
from rollcall.launch.scheduler.job import Job, array_tasks, one_line
from rollcall.launch.submission import preflight, resources, snapshot, surroundings
from rollcall.launch.submission.options import CommandLine
from rollcall.launch.submission.snapshot import Snapshot
from rollcall.launch.submission.surroundings import Surroundings
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import listed, note, word
from rollcall.records.job import Submission, slurm_output
from rollcall.records.nodes import NodeReport
from rollcall.records.run_dir import RunDir, named, plain
from rollcall.system.files import closest, is_there, matches


class TakenError(RefusedError):
    """Another submission of the run has come first since this one was planned."""


@dataclass(frozen=True, eq=False, repr=False)
class SubmissionPlan:
    """Everything that starting a run needs."""

    argv: tuple[str, ...]
    run: RunDir
    recipes: tuple[Path, ...]  # the user's recipe files, which are copied to `job/`
    code: Snapshot | None  # what to copy to `code/`; None if the run keeps the code that it has
    launcher: Snapshot | None  # what to copy to `job/rollcall/`, if `code/` is the user's code
    job: Job
    is_new: bool = False  # whether the run directory is to be created
    before: int = 0  # how often the run was submitted before
    modules: tuple[Snapshot, ...] = ()  # for `job/modules/`: the user's modules from elsewhere
    remarks: tuple[str, ...] = ()  # what a dry run says about the Python of the job
    later: tuple[Job, ...] = ()  # further jobs of the run, each starting after the one before
    files: Mapping[str, str | bytes] = field(default_factory=dict)  # others in `job/`, by name
    resume: bool = False  # whether to continue a run that has failed or finished
    wait: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)  # of the job's options, by name


def plan(
    line: CommandLine, argv: Sequence[str], setup: tuple[str, ...], is_sweep: bool = False
) -> SubmissionPlan:
    """Return what a command line asks for, without writing anything; or raise RefusedError.

    What the cells of a sweep train is left to the caller to check: they may replace any key.
    """
    if line.own.in_allocation:
        line = resources.in_allocation(line, os.environ)
    line = resources.spread(line)
    own = line.own
    if "array" in line.passed:
        array_tasks(line.passed["array"] or "")  # refuses what is not an array
    words = _training_words(line)
    code = find.find(line.program) if words is None else None
    recipe, config = _configuration(own, words or ())
    run = RunDir(config.run.root, config.run.name or "")
    stem = plain(code.name if code else recipe)
    if config.run.name is None:
        if own.resume or own.new_code:
            raise RefusedError("--resume, --new-code: add --name RUN (rollcall status lists them)")
        run = RunDir.unused(config.run.root, f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    elif own.name == "auto":
        request = json.dumps(code.words) if code else config.model_dump_json(exclude={"run"})
        digest = hashlib.sha256(request.encode()).hexdigest()[:8]
        run = RunDir(config.run.root, f"{stem}-{digest}")
    takes_code = own.new_code or not run.code.exists()
    program = code.words if code else _training(words or (), run, config)
    code = code or _code_of_modules(config, run, takes_code)
    user = surroundings.of(line, code, config)
    if words is not None and not is_sweep:
        for remark in check_training(line, setup, config):
            note(remark)
    if code and not takes_code:
        _check_copy(code, run, user.links)
    copy = _snapshot(code, run, user) if takes_code else None
    if copy is not None:
        user.warn(copy)
    text = code.script.read_bytes() if code and code.script else b""
    if b"ParameterServerStrategy" in text and not own.roles:
        note("ParameterServerStrategy waits forever without --roles, such as chief,ps:1,worker:2")
    if own.time and re.fullmatch(r"\d+:\d+", own.time):
        minutes, seconds = map(int, own.time.split(":"))
        note(f"--time {own.time} is {minutes} minutes and {seconds} seconds")
    cpus, cpus_from = resources.cpus_per_node(line)
    job = user.placed(_job(line, run, code, program, setup, cpus), run)
    if line.groups:
        groups = tuple(_group(group, job) for group in line.groups)
        job = replace(job, nodes=sum(group.nodes for group in groups), groups=groups)
    return SubmissionPlan(
        argv=tuple(argv),
        run=run,
        recipes=tuple(Path(source) for source in words or () if is_file(source)),
        code=copy,
        launcher=snapshot.plan(ROOT, [run.path.parent], PACKAGED) if takes_code and code else None,
        job=job,
        modules=user.modules if takes_code else (),
        remarks=user.remarks if own.dry_run else (),
        is_new=config.run.name is None or not run.path.exists(),
        before=len(Submission.read(run.path)),
        later=(job,) * (own.chain - 1),
        resume=own.resume,
        wait=own.wait,
        origins={**line.origins, "cpus-per-task": cpus_from},
    )


def _training_words(line: CommandLine) -> tuple[str, ...] | None:
    if not line.program:
        return tuple(line.own.words)
    if line.program[:2] == ("-m", "train") and not _is_in_checkout():
        return None  # a module of the user
    return training_words(line.program)


def _is_in_checkout() -> bool:
    return installation.IS_CHECKOUT and Path.cwd() == ROOT


def _configuration(own: Namespace, words: Sequence[str]) -> tuple[str, Config]:
    for text in words:
        if "=" not in text and text.endswith(SHELL_SCRIPTS):
            raise RefusedError(f"{text} is a job script, not a recipe; submit it: sbatch {text}")
    named = [word(f"run.{key}", text) for key in ("name", "root") if (text := getattr(own, key))]
    try:
        recipe, config = parse([*words, *named])
    except ConfigError as error:
        keys = "|".join(key for key in ("name", "root") if getattr(own, key)) or "(?!)"
        text = re.sub(rf"^run\.({keys}):", r"--\1:", str(error), flags=re.MULTILINE)
        raise ConfigError(text) from None
    if (problem := preflight.problem(Path(config.run.root).absolute())) is not None:
        raise RefusedError(f"{'--root' if own.root else 'run.root'}: {problem}")
    return recipe, config


def _code_of_modules(config: Config, run: RunDir, takes_code: bool) -> UserCode | None:
    """Return the user's code that a training needs; None if rollcall's own code is enough."""
    if not takes_code and not run.launcher.exists():
        return None  # the run has only rollcall's code, whatever lies in this directory
    if _is_in_checkout():
        return None  # the user's modules are part of the copy of rollcall
    code = find.modules_beside(config)
    if code is None and not takes_code:
        here = Path.cwd()
        return UserCode(find.checkout_of(here), here)
    return code


def _check_copy(code: UserCode, run: RunDir, links: Sequence[str]) -> None:
    if not code.in_copy(run.code).is_dir():
        raise RefusedError(
            f"the code of run {run.name} was copied from another directory, without "
            f"{code.directory}; submit from that directory, or add --new-code"
        )
    for name in links:
        if not (run.code / name).is_symlink():
            has = f"run {run.name} keeps its code, which has no such link"
            raise RefusedError(f"--link {name}: {has}; add --new-code")


def _training(words: Sequence[str], run: RunDir, config: Config) -> tuple[str, ...]:
    """Return what a rank runs to train, with paths that work in a job."""
    copied = [str(run.job / Path(source).name) if is_file(source) else source for source in words]
    return (*installation.TRAIN, *copied, *absolute_paths(config))


def absolute_paths(config: Config) -> list[str]:
    """Return words for paths relative to this directory, as the job works in another one."""
    copied: list[str] = []
    root = Path(config.data.root)
    if not root.is_absolute():
        copied.append(word("data.root", str(root.absolute())))
    copied += [word("run.trust", config.run.trust)] if config.run.trust else []
    parts = [part.strip() for part in (config.data.path or "").split(",")]
    found = [str(Path(part).absolute()) if _is_here(part) else part for part in parts]
    if found != parts:
        copied.append(word("data.path", ",".join(found)))
    init = config.model.init or ""
    weights = Path(init) if is_there(Path(init)) else named(init, "checkpoints")
    if init and weights and not weights.is_absolute():
        copied.append(word("model.init", str(weights.absolute())))
    return copied


def _is_here(pattern: str) -> bool:
    """Return True for the relative path of something; a user's data may have other names."""
    return bool(pattern) and not Path(pattern).is_absolute() and matches(pattern)


def check_training(line: CommandLine, setup: tuple[str, ...], config: Config) -> list[str]:
    """Refuse what would end a training at its start; return what only its nodes can know."""
    own, remarks = line.own, []
    _check_mesh(line, config)
    is_here = own.local or not slurm.is_available()
    is_there_later = bool(setup or own.container or "dependency" in line.passed)
    # The file system of the run directory is the one that all nodes certainly have.
    shared = closest(Path(config.run.root).absolute()).stat().st_dev
    for path, problem in arguments.absent(config):
        is_shared = not path.is_absolute() or closest(path).stat().st_dev == shared
        if not is_there_later and (is_here or is_shared):
            raise RefusedError(problem)
        remarks.append(f"on this machine, {problem}; every node of the job needs it")
    if not (setup or own.python or own.container):  # whose modules are others
        arguments.check_modules(config)
        if not remarks:  # a path that only the nodes have may hold the tokenizer
            arguments.check_packages(config)
    return remarks


def _check_mesh(line: CommandLine, config: Config) -> None:
    (least, most), parallel = line.own.nodes, config.parallel
    if least == most and not resources.says_ranks(line):
        return  # each node starts one rank for each of its GPUs, which are not known here
    ranks = resources.ranks_of_nodes(line)
    if mesh.NODE in parallel.mesh_text and len(set(ranks)) > 1:
        needs = f"the mesh {parallel.mesh_text} needs the same number of ranks on every node"
        raise RefusedError(f"--nproc-per-node {','.join(map(str, ranks))}: {needs}")
    for nodes in range(least, most + 1):
        world = nodes * ranks[0] if least < most else sum(ranks)
        try:
            parallel.degrees(world, ranks[0])
        except ConfigError as error:
            here = f"--nodes {least}-{most}: with {nodes} of them, " if least < most else ""
            raise RefusedError(f"{here}{error}") from None


def _job(
    line: CommandLine,
    run: RunDir,
    code: UserCode | None,
    program: Sequence[str],
    setup: tuple[str, ...],
    cpus: int,
) -> Job:
    own = line.own
    least, most = own.nodes
    same = "spares", "gpus_per_node", "mem", "time", "partition"
    job_id = "%A_%a" if "array" in line.passed else "%j"
    program = code.command(run.code, program) if code else program
    options = {name: text for name, text in line.passed.items() if name != "cpus-per-gpu"}
    if own.preflight and not own.local and slurm.is_available():
        _leave_out_bad_nodes(line, options)
    return Job(
        name=run.name,
        nodes=most,
        min_nodes=least if least < most else None,
        command=(*_supervisor(line, run), "--", *program),
        directory=str(run.launcher if code else run.code),
        output=str(slurm_output(Path(str(run.job).replace("%", "%%")), job_id)),
        cpus_per_task=cpus,
        **{name: getattr(own, name) for name in same},
        options=options,
        srun=tuple(map(one_line, own.srun_arg)),
        setup=setup,
        batch=(
            *installation.command("batch"),
            f"--run-dir={run.path}",
            *(["--preflight"] if own.preflight else []),
            *(f"--teardown={line}" for line in own.teardown),
        ),
        is_training=is_training(program),
        continues=is_training(program) or bool(own.max_restarts),
        allocation=os.environ["SLURM_JOB_ID"] if own.in_allocation else None,
    )


def _group(line: CommandLine, job: Job) -> Job:
    own, of_first = line.own, ("cpus-per-gpu", "dependency")  # not repeated for each group
    cpus, _ = resources.cpus_per_node(line)
    return replace(
        job,
        nodes=own.nodes[1],
        command=(),
        cpus_per_task=cpus,
        gpus_per_node=own.gpus_per_node,
        mem=own.mem,
        partition=own.partition,
        options={name: text for name, text in line.passed.items() if name not in of_first},
    )


def _leave_out_bad_nodes(line: CommandLine, given: dict[str, str | None]) -> None:
    """Let the options for sbatch exclude nodes that failed before."""
    there = cluster.names("nodes", line.own.partition)
    failed = {it.host for it in NodeReport.current(cluster.configuration("ClusterName") or "")}
    bad = sorted(failed.intersection(there))
    if bad and len(there) - len(bad) < line.own.nodes[0] + line.own.spares:
        note(f"too few other nodes to avoid {listed(bad)}, which failed before: rollcall nodes")
    elif bad and "nodelist" not in given:
        note(f"avoids {listed(bad)}, which failed before: rollcall nodes")
        given["exclude"] = ",".join([*filter(None, [given.get("exclude")]), *bad])


def _supervisor(line: CommandLine, run: RunDir) -> list[str]:
    own = line.own
    words = [*installation.command("supervise"), "--run-dir", str(run.path)]
    ranks = resources.ranks_of_nodes(line)
    if line.groups:
        own = Namespace(**vars(own) | {"nproc_per_node": ",".join(map(str, ranks))})
    if own.roles:
        try:
            roles.of_ranks(own.roles, sum(ranks))
        except ValueError as error:
            raise RefusedError(f"--roles: {error}; give --nodes and --nproc-per-node") from None
    for option in ("nproc-per-node", "start-method", "framework", "roles", "max-restarts"):
        if (value := getattr(own, option.replace("-", "_"))) is not None:
            words += [f"--{option}", str(value)]
    return words


def _snapshot(code: UserCode | None, run: RunDir, user: Surroundings) -> Snapshot:
    modules = tuple(user.facts.own.values())
    if code is None:
        return snapshot.plan(ROOT, [run.path.parent], PACKAGED, modules=modules)
    leave_out = [run.path.parent, *code.without]
    inputs = data.named(code.words[1:], code) if code.words else None
    copy = snapshot.plan(code.checkout, leave_out, (), user.links, modules, inputs)
    if code.script and os.path.relpath(code.script, code.checkout) not in copy.files:
        why = "git ignores it, so the run's copy would not have it"
        raise RefusedError(f"{code.script.name}: {why}; remove it from .gitignore")
    return copy
