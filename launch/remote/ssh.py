"""`rollcall COMMAND --host HOST …`: run a command about this project on another machine, by ssh.

`submit` and `sweep submit` first bring the code there: a commit of all files that git does not
ignore is pushed to a repository in the home there, ~/.rollcall/PROJECT, and checked out. Your own
repository does not change: neither its index, nor its branches, nor its objects.
"""

import argparse
import hashlib
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollcall.launch.program.find import checkout_of
from rollcall.launch.submission import snapshot
from rollcall.refusal import RefusedError

PLACE = ".rollcall"
"""Folder of the projects in the home on the other machine."""
REFERENCE = "refs/rollcall/submitted"
FAILED = 255
"""Exit code of ssh itself, such as for a host that it cannot reach."""


def main(argv: Sequence[str]) -> int:
    """Run a command of rollcall on the host that it names; return its exit code."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="rollcall", allow_abbrev=False, add_help=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--host-command", default=os.environ.get("ROLLCALL_HOST_COMMAND"))
    own, words = parser.parse_known_args(argv[:end])
    if own.host.startswith("-"):
        parser.error(f"--host {own.host}: expected a host as for ssh, which would take an option")
    checkout = checkout_of(Path.cwd())
    identity = hashlib.sha256(f"{socket.gethostname()}:{checkout}".encode()).hexdigest()[:8]
    place = f"{PLACE}/{checkout.name}-{identity}"
    directory = os.path.join(place, os.path.relpath(Path.cwd(), checkout))  # noqa: PTH118
    command = own.host_command or "rollcall"
    yet = f"--host {own.host}: nothing of {Path.cwd()} is there yet; submit a run first"
    line = _or_say(f"cd {shlex.quote(directory)} 2>/dev/null", yet)
    for link in _links(words):
        folder = os.path.normpath(f"{directory}/{link}/..")
        why = f"--link {link}: it is not there, because git ignores it here; copy it there once: "
        text = f"{why}rsync -a {link} {own.host}:{folder}/"
        line += _or_say(f"[ -e {shlex.quote(link)} ]", text)
    # ssh ends with 255 if it fails; a command that does so itself leaves a file.
    mark = f'"$HOME"/{PLACE}/ended-{secrets.token_hex(8)}'
    line += f"{command} {shlex.join([*words, *argv[end:]])}; "
    line += f"code=$?; [ $code != {FAILED} ] || touch {mark}; exit $code"
    terminal = ["-t"] if sys.stdout.isatty() else []
    try:
        if words[:1] == ["submit"] or words[:2] == ["sweep", "submit"]:
            _bring(checkout, own.host, place)
        # A login shell: without it, modules and rollcall may not be on PATH.
        done = _ssh(*terminal, own.host, f"bash -lc {shlex.quote(line)}")
        if done.returncode == FAILED and _ssh(own.host, f"rm {mark}").returncode != 0:
            raise RefusedError("ssh has failed, as it says above")
    except RefusedError as error:
        raise RefusedError(f"--host {own.host}: {error}") from None
    if done.returncode == 0 and words[:1] == ["submit"] and "--dry-run" not in words:
        print(f"from here:     rollcall status --host {own.host}")
    return done.returncode


def _links(words: Sequence[str]) -> list[str]:
    """Return what `--link` names and exists here; the code that is brought may lack it."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--link", action="append", default=[])
    links = [link.rstrip("/") for link in parser.parse_known_args(words)[0].link]
    return [link for link in links if Path(link).exists() and not Path(link).is_absolute()]


def _or_say(test: str, problem: str) -> str:
    """Return shell code that ends with an error message unless a test succeeds."""
    return f"{test} || {{ echo {shlex.quote(f'rollcall: error: {problem}')} >&2; exit 2; }}; "


def _bring(checkout: Path, host: str, place: str) -> None:
    """Make the other machine's checkout of this project equal to this one."""
    plan = snapshot.plan(checkout, [])  # refuses what is too large
    with tempfile.TemporaryDirectory(prefix="rollcall-") as scratch:
        git = _Git(checkout, Path(scratch))
        git.run("update-index", "--add", "-z", "--stdin", files=plan.files)  # submodules as well
        tree = git.run("write-tree")
        parents = ["-p", plan.commit] if plan.commit else []
        commit = git.run("commit-tree", tree, *parents, "-m", f"Submitted from {checkout}")
        _prepare(host, f"git init -q {shlex.quote(place)}")
        git.run("push", "-q", "--force", f"{host}:{place}", f"{commit}:{REFERENCE}")
        _prepare(host, f"git -C {shlex.quote(place)} checkout -q --force --detach {REFERENCE}")


def _prepare(host: str, line: str) -> None:
    done = _ssh(host, line, stderr=subprocess.PIPE)
    if done.returncode != 0:
        raise RefusedError(done.stderr.strip() or f"ssh ends with exit code {done.returncode}")


def _ssh(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["ssh", *words], text=True, errors="replace", **options)
    except FileNotFoundError:
        raise RefusedError("ssh is not on PATH") from None


class _Git:
    """git on a checkout, or on a directory without git, with an index and objects apart."""

    def __init__(self, checkout: Path, scratch: Path) -> None:
        self._checkout = checkout
        self._env = os.environ | {"GIT_INDEX_FILE": f"{scratch}/index"}
        for role in ("AUTHOR", "COMMITTER"):
            self._env |= {f"GIT_{role}_NAME": "rollcall", f"GIT_{role}_EMAIL": "rollcall@localhost"}
        if (checkout / ".git").exists():
            objects = self.run("rev-parse", "--path-format=absolute", "--git-path", "objects")
            (scratch / "objects").mkdir()
            self._env["GIT_OBJECT_DIRECTORY"] = f"{scratch}/objects"
            self._env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = objects
        else:
            self._env |= {"GIT_DIR": f"{scratch}/git", "GIT_WORK_TREE": str(checkout)}
            self.run("init", "-q")

    def run(self, *words: str, files: Sequence[str] = ()) -> str:
        listed = "\0".join(files).encode(errors="surrogateescape")
        command = ["git", "-c", "core.hooksPath=/dev/null", *words]  # no hooks of the user's
        try:
            done = subprocess.run(
                command, cwd=self._checkout, env=self._env, input=listed, capture_output=True
            )
        except FileNotFoundError:
            raise RefusedError("git is not on PATH") from None
        if done.returncode != 0:
            raise RefusedError(f"git {words[0]}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode().strip()
