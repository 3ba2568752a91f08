"""`rollcall COMMAND --host HOST …`: run a command about this project on another machine, by ssh.

`submit` and `sweep submit` first copy the code: a commit of all files that git does not ignore is
pushed to ~/.rollcall/PROJECT on the host and checked out there. The index, the branches and the
objects of your own repository do not change. The file that `report` writes is moved here.
"""

import hashlib
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rollcall.cli.parser import Parser
from rollcall.launch.program import data
from rollcall.launch.program.find import UserCode, checkout_of
from rollcall.launch.submission import snapshot
from rollcall.messages.refusal import RefusedError, refusing
from rollcall.messages.text import note

PROJECTS = ".rollcall"
"""Folder of the projects in the home directory on the other machine."""
REFERENCE = "refs/rollcall/submitted"
SSH_FAILED = 255
"""Exit code of ssh itself, such as for a host that it cannot reach."""


def main(argv: Sequence[str]) -> int:
    """Run a command of rollcall on the host of its option --host; return its exit code."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="rollcall", allow_abbrev=False, add_help=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--host-command", default=os.environ.get("ROLLCALL_HOST_COMMAND"))
    options, words = parser.parse_known_args(argv[:end])
    host, here = options.host, Path.cwd()
    if host.startswith("-"):
        parser.error(f"--host {host}: expected a host name; ssh would read this as an option")
    if is_report := words[:1] == ["report"] and not {"-h", "--help"} & {*words}:
        parser.add_argument("-o", "--output", default=f"report-{host}.html")
        options, words = parser.parse_known_args(argv[:end])
        words.append(f"--output={options.output}")  # a name that the other machine does not choose
    checkout = checkout_of(here)
    identity = hashlib.sha256(f"{socket.gethostname()}:{checkout}".encode()).hexdigest()[:8]
    copy = f"{PROJECTS}/{checkout.name}-{identity}"
    directory = os.path.join(copy, os.path.relpath(here, checkout))  # noqa: PTH118
    problem = f"--host {host}: {here} has not been copied there yet; submit a run first"
    message = shlex.quote(f"rollcall: error: {problem}")
    line = f"cd {shlex.quote(directory)} 2>/dev/null || {{ echo {message} >&2; exit 2; }}; "
    # ssh ends with 255 if it fails; a command that does so itself leaves a file.
    mark = f'"$HOME"/{PROJECTS}/ended-{secrets.token_hex(8)}'
    line += f"{options.host_command or 'rollcall'} {shlex.join([*words, *argv[end:]])}; "
    line += f"code=$?; [ $code != {SSH_FAILED} ] || touch {mark}; exit $code"
    terminal = ["-t"] if sys.stdout.isatty() else []
    try:
        if words[:1] == ["submit"] or words[:2] == ["sweep", "submit"]:
            code = UserCode(checkout, here)
            _copy(code, host, copy, data.named(argv[end:], code) if argv[end:] else None)
        # A login shell: without it, modules and rollcall may not be on PATH.
        done = _ssh(*terminal, host, f"bash -lc {shlex.quote(line)}")
        if done.returncode == SSH_FAILED and _ssh(host, f"rm {mark}").returncode != 0:
            raise RefusedError("ssh failed; see its message above")
        if is_report and done.returncode == 0:
            _bring(options.output, host, directory)
    except RefusedError as error:
        raise RefusedError(f"--host {host}: {error}") from None
    if done.returncode == 0 and words[:1] == ["submit"] and "--dry-run" not in words:
        print(f"from here:     rollcall status --host {host}")
    return done.returncode


def _bring(file: str, host: str, directory: str) -> None:
    name = shlex.quote(file)
    with refusing(f"cannot write {file} here", "; use -o"), Path(file).open("wb") as here:
        line = f"cd {shlex.quote(directory)} && cat -- {name} && rm -- {name}"
        _prepare(host, line, stdout=here)


def _copy(code: UserCode, host: str, copy: str, inputs: Iterable[str] | None) -> None:
    """Make the checkout `copy` on the other machine equal to this one."""
    checkout = code.checkout
    plan = snapshot.plan(checkout, [], inputs=inputs)  # refuses files that are too large
    if plan.results:
        note(plan.describe_results())
    with tempfile.TemporaryDirectory(prefix="rollcall-") as scratch:
        env = _environment(checkout, Path(scratch))

        def git(*words: str, names: Sequence[str] = ()) -> str:
            return snapshot.git(checkout, *words, env=env, names=names).decode().strip()

        git("update-index", "--add", "-z", "--stdin", names=plan.files)  # submodules as well
        tree = git("write-tree")
        parents = ["-p", plan.commit] if plan.commit else []
        commit = git("commit-tree", tree, *parents, "-m", f"Submitted from {checkout}")
        _prepare(host, f"git init -q {shlex.quote(copy)}")
        git("push", "-q", "--force", f"{host}:{copy}", f"{commit}:{REFERENCE}")
        _prepare(host, f"git -C {shlex.quote(copy)} checkout -q --force --detach {REFERENCE}")


def _prepare(host: str, line: str, **options: Any) -> None:
    done = _ssh(host, line, stderr=subprocess.PIPE, **options)
    if done.returncode != 0:
        raise RefusedError(done.stderr.strip() or f"ssh ends with exit code {done.returncode}")


def _ssh(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["ssh", *words], text=True, errors="replace", **options)
    except FileNotFoundError:
        raise RefusedError("ssh is not on PATH") from None


def _environment(checkout: Path, scratch: Path) -> dict[str, str]:
    """Return variables by which git uses an index and objects in `scratch`, also outside git."""
    env = os.environ | {"GIT_INDEX_FILE": f"{scratch}/index"}
    for role in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{role}_NAME": "rollcall", f"GIT_{role}_EMAIL": "rollcall@localhost"}
    if (checkout / ".git").exists():
        words = ("rev-parse", "--path-format=absolute", "--git-path", "objects")
        objects = os.fsdecode(snapshot.git(checkout, *words)).strip()
        (scratch / "objects").mkdir()
        env["GIT_OBJECT_DIRECTORY"] = f"{scratch}/objects"
        env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = objects
    else:
        env |= {"GIT_DIR": f"{scratch}/git", "GIT_WORK_TREE": str(checkout)}
        snapshot.git(checkout, "init", "-q", env=env)
    return env
