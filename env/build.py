"""Make the environment that env/run needs, then start env/run again.

Only env/run starts this file, with the interpreter that builds; it uses only the standard library.
An environment is a folder ``py<version>-<torch choice>-<hash>`` in ROLLCALL_ENVS (turn.py lists the
files in it). It contains the packages that pyproject.toml lists, but not rollcall itself: the code
always runs from the checkout.
"""

import signal
import sys


def stop(number: int, _: object) -> None:
    """End this process: an unfinished environment and its lock are removed on the way."""
    print("env/run: interrupted; repeat the command to build again", file=sys.stderr, flush=True)
    sys.exit(128 + number)


if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, stop)  # here: an interrupted import would print a traceback

import contextlib
import functools
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from choose import INDEX, CannotBuild, choose, is_reachable
from turn import read, take_turn

ROOT = Path(__file__).resolve().parent.parent
PROGRESS_S = 15.0  # between two lines about the progress of an installation
NEEDED_GB, NEEDED_GB_CPU = 9.0, 3.0  # the wheels and the unpacked files

# A torchvision wheel loads only with the torch build it was made for; resolvers do not know that.
CHECK = """
from importlib.metadata import version
print("torch", version("torch"), "and torchvision", version("torchvision"))
import torch, torchvision
box = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
assert torchvision.ops.nms(box, torch.ones(1), 0.5).tolist() == [0]
print(torch.version.cuda)
"""

# Pattern in the installers' output -> cause and remedy. The first match counts.
CAUSES = (
    (
        r"No space left on device|Disk quota exceeded|os error (?:28|122)\b",
        "the disk or your quota is full. Free some space, for example by deleting old environments "
        "in {envs}, or set ROLLCALL_ENVS to a larger file system.",
    ),
    (
        r"ensurepip is not available|No module named '?(?:venv|ensurepip)",
        "{python} cannot make virtual environments. On Debian: apt install python3-venv. Anywhere: "
        "install uv, or set ROLLCALL_PYTHON to another Python.",
    ),
    (
        r"(?i)name resolution|failed to resolve|name or service not known|dns error|refused"
        r"|network is unreachable|connect(?:ion)? ?time(?:d )?out|error sending request|proxyerror"
        r"|failed to establish|certificate verify failed",
        "the package registry cannot be reached from this host. Set https_proxy if you have a "
        "proxy, or run this once on a host with a network that shares {envs}, such as the login "
        "node: ROLLCALL_TORCH={torch} env/run true",
    ),
    (
        r"No matching distribution|No solution found|ResolutionImpossible|conflicting dependencies",
        "no set of packages satisfies ROLLCALL_TORCH={torch} and pyproject.toml with {python}. "
        "Choose another ROLLCALL_TORCH.",
    ),
)


@dataclass
class Builder:
    """The builder of one environment in its folder: uses uv if it is on PATH, else venv and pip."""

    folder: Path
    python: str
    torch: str
    detail: Callable[[str], None]

    def __post_init__(self) -> None:
        self.log = self.folder / "install.log"
        self.venv = self.folder / f"venv-{secrets.token_hex(3)}"
        self.uv = shutil.which("uv")

    def build_in_turn(self) -> None:
        """Build unless another process does or has done so; raise CannotBuild if a build failed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if lock := take_turn(self.folder, say):
            try:
                self.build()
            except CannotBuild as error:
                write(self.folder / "failed", str(error))
                raise
            finally:
                lock.release()

    def build(self) -> None:
        """Build in a new folder, verify, and write the stamp that marks the environment as ready.

        Raises:
            CannotBuild: the message gives the cause and the remedy; only the log is left.
        """
        started = time.monotonic()
        version, _, build = self.torch.rpartition("+")
        needed = NEEDED_GB_CPU if build == "cpu" else NEEDED_GB
        check_space(self.folder, needed)
        self.check_network(build)
        say(f"making {self.folder} (up to {needed:.0f} GB; log: {self.log.name} there)")
        self.log.unlink(missing_ok=True)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        wanted = [*project["dependencies"], *extras["dev"], *extras["report"]]
        torches = [name for name in wanted if re.match(r"torch(vision)?\b(?!-)", name)]
        index = [] if build == "default" else ["--index-url", INDEX + build]
        maker = [self.python, "-m", "venv"]
        if self.uv:
            maker = [self.uv, "venv", "--python", self.python]
        try:
            self.run(*maker, str(self.venv))
            self.detail("installing torch and torchvision (several GB for a CUDA build)")
            # First and alone: PyTorch's index has few other packages, the registry other builds.
            self._install(*index, *torches, *([f"torch=={version}"] if version else []))
            self.detail("installing the other packages")
            self._install(*wanted)
            self.detail("checking that torch and torchvision work together")
            self._verify(build)
            # The files must survive a power cut that follows the stamp.
            subprocess.run(["sync", "-f", str(self.venv)], check=False)
            stamp = self.folder / "ready"
            if not stamp.exists():  # otherwise another builder, believed dead, was faster
                write(stamp, self.venv.name)
                say(f"ready after {time.monotonic() - started:.0f} s")
        finally:
            if read(self.folder / "ready") != self.venv.name:
                shutil.rmtree(self.venv, ignore_errors=True)

    def check_network(self, build: str) -> None:
        """Raise CannotBuild at once if an installer would wait in vain for the registry."""
        if not is_reachable(build):
            raise CannotBuild(self._cause("network is unreachable"))

    def _install(self, *requirements: str) -> None:
        python = str(self.venv / "bin" / "python")
        if self.uv:
            # Compile now, as pip does: later many ranks import from a shared file system.
            command = [self.uv, "pip", "install", "--python", python, "--compile-bytecode"]
        else:
            command = [python, "-m", "pip", "install", "--no-input", "--progress-bar=off"]
        self.run(*command, *requirements)

    def _verify(self, build: str) -> None:
        check = [str(self.venv / "bin" / "python"), "-I", "-c", CHECK]
        done = subprocess.run(check, capture_output=True, text=True, check=False)
        with self.log.open("a") as log:
            log.write(f"$ the check in build.py\n{done.stdout}{done.stderr}")
        pair, _, cuda = done.stdout.strip().partition("\n")
        if done.returncode != 0:
            last = done.stderr.strip().rpartition("\n")[2]
            raise CannotBuild(
                f"the installer found {pair}, which do not work together ({last}). Choose another "
                "pair with ROLLCALL_TORCH, or remove the wheel folder or extra index that has only "
                f"one of the two.\nLog: {self.log}"
            )
        if build.startswith("cu") and cuda.replace(".", "") != build[2:]:
            raise CannotBuild(
                f"ROLLCALL_TORCH asks for {build}, but the installer found {pair} (CUDA {cuda}). "
                f"Does an extra index of pip or uv offer another build?\nLog: {self.log}"
            )

    def run(self, *command: str) -> None:
        """Run one step of the installation; its output goes to the log."""
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
        # Unpack wheels beside the environment: /tmp is often too small for CUDA wheels.
        with (
            self.log.open("a+") as log,
            tempfile.TemporaryDirectory(dir=self.folder, prefix="venv-tmp") as scratch,
        ):
            print("$", *command, file=log, flush=True)
            start = log.tell()
            installer = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,  # not the user's directory, which may contain a configuration
                env=clean | {"TMPDIR": scratch, "PYTHONNOUSERSITE": "1"},
            )
            code = self._wait(installer)
            log.seek(start)
            output = log.read()
        if code != 0:
            raise CannotBuild(f"{self._cause(output)}\nLog: {self.log}")

    def _wait(self, installer: subprocess.Popen[bytes]) -> int:
        """Wait for an installer, and say now and then how much there is; return the exit code."""
        started = time.monotonic()
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return installer.wait(PROGRESS_S)
                size = 0
                for path in self.folder.rglob("*"):
                    with contextlib.suppress(OSError):  # it is gone by now
                        size += path.lstat().st_size
                self.detail(f"{size / 1e6:,.0f} MB after {time.monotonic() - started:.0f} s")
        except BaseException:  # env/run was asked to stop
            installer.kill()
            installer.wait()
            raise

    def _cause(self, output: str) -> str:
        for pattern, cause in CAUSES:
            if re.search(pattern, output):
                return cause.format(envs=self.folder.parent, python=self.python, torch=self.torch)
        return "the installation failed; its last lines: " + " / ".join(output.splitlines()[-2:])


def check_space(folder: Path, needed_gb: float) -> None:
    """Raise CannotBuild when the file system of ``folder`` has too little free space."""
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < needed_gb:
        raise CannotBuild(
            f"not enough disk space: {folder.parent} has {free_gb:.1f} GB free, and making this "
            f"environment needs about {needed_gb:.0f} GB. Free some space, for example by deleting "
            "old environments there, or set ROLLCALL_ENVS to a larger file system."
        )


def say(line: str) -> None:
    """Print a line about the build."""
    print(f"env/run: {line}", file=sys.stderr, flush=True)


def write(path: Path, line: str) -> None:
    """Write a short file, whole or not at all."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(3)}")
    with beside.open("w") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def _prepare(python: str, envs: Path, digest: str, driver: str, chosen: Path, quiet: bool) -> str:
    """Wait until this process or another one has made the environment; return the torch choice."""
    before, after = "py{}.{}-".format(*sys.version_info), f"-{digest}"
    detail = (lambda _: None) if quiet else say
    stamps = envs.glob(f"{before}*{after}/ready")
    ready = {path.parent.name.removeprefix(before).removesuffix(after) for path in stamps}
    torch = choose(os.environ.get("ROLLCALL_TORCH", ""), driver, ready, detail)
    folder = envs / f"{before}{torch}{after}"
    Builder(folder, python, torch, detail).build_in_turn()
    interpreter = folder / read(folder / "ready") / "bin" / "python"
    if not os.access(interpreter, os.X_OK):
        advice = "Set ROLLCALL_PYTHON to an interpreter that every node has, or delete that folder."
        raise CannotBuild(
            f"{folder} has {interpreter.resolve()}, which does not run here. {advice}"
        )
    with contextlib.suppress(OSError):  # the site's folder, which only its administrator may write
        chosen.parent.mkdir(exist_ok=True)
        write(chosen, torch)
    return torch


def main() -> None:
    """Make the environment and start env/run again with its original arguments."""
    python, envs, digest, driver, chosen, *arguments = sys.argv[1:]
    quiet = "--quiet" in arguments[:3]
    made = functools.partial(_prepare, python, Path(envs), digest, driver, Path(chosen), quiet)
    run_again(made, envs, arguments)


def run_again(prepare: Callable[[], str], folder: str, arguments: Sequence[str]) -> NoReturn:
    """Make an environment, and start env/run again with its original arguments.

    Args:
        prepare: makes the environment and returns the torch choice.
        folder: the folder that a message names if a file cannot be written.
        arguments: the arguments of env/run.
    """

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, stop)
    try:
        torch = prepare()
    except CannotBuild as error:
        sys.exit(f"env/run: {error}")
    except OSError as error:
        advice = "Set ROLLCALL_ENVS to a folder that you may write to, with enough space."
        sys.exit(f"env/run: {error.strerror}: {error.filename or folder}. {advice}")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and exec would keep that
    run = [shutil.which("bash") or "/bin/bash", str(ROOT / "env" / "run"), *arguments]
    os.execve(run[0], run, os.environ | {"ROLLCALL_TORCH": torch})


if __name__ == "__main__":
    main()
