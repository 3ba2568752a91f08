"""Make the environment that env/run asks for, then start env/run again, which finds it ready.

Started by env/run alone, with the interpreter to build with; only the standard library is used. An
environment is a folder ``py<version>-<torch choice>-<hash>`` of the environments' folder (see
turn.py for what lies in it). It holds what pyproject.toml asks for, not the project: code always
runs from the checkout.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from choose import INDEX, CannotBuild, choose
from turn import take_turn

ROOT = Path(__file__).resolve().parent.parent
NEEDED_GB = {"cpu": 3.0}  # wheels while they are unpacked, and what comes out of them
NEEDED_GB_CUDA = 9.0

# A torchvision wheel loads only with the torch build that it was made for, which no resolver knows.
CHECK = """
from importlib.metadata import version
print("torch", version("torch"), "and torchvision", version("torchvision"))
import torch, torchvision
box = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
assert torchvision.ops.nms(box, torch.ones(1), 0.5).tolist() == [0]
print(torch.version.cuda)
"""

# What the installers print -> the cause and its cure. The first that is found tells.
CAUSES = (
    (
        r"No space left on device|Disk quota exceeded|os error (?:28|122)\b",
        "the disk or your quota on it is full. Free some space, old environments in {envs} for "
        "one, or set ROLLCALL_ENVS to a larger file system.",
    ),
    (
        r"ensurepip is not available|No module named '?(?:venv|ensurepip)",
        "{python} cannot make virtual environments. On Debian: apt install python3-venv. Anywhere: "
        "install uv, or name another Python in ROLLCALL_PYTHON.",
    ),
    (
        r"(?i)name resolution|failed to resolve|name or service not known|dns error|refused"
        r"|network is unreachable|connect(?:ion)? ?time(?:d )?out|error sending request|proxyerror"
        r"|failed to establish|certificate verify failed",
        "the package registry cannot be reached from this host. Set https_proxy if there is a "
        "proxy, or run this once where there is a network and the same {envs}, such as on the "
        "login node: ROLLCALL_TORCH={torch} env/run true",
    ),
    (
        r"No matching distribution|No solution found|ResolutionImpossible|conflicting dependencies",
        "no set of packages fits ROLLCALL_TORCH={torch} and pyproject.toml with {python}. "
        "Choose another ROLLCALL_TORCH.",
    ),
)


class Builder:
    """Makes one environment in its folder, with uv where it is on PATH, otherwise venv and pip."""

    def __init__(self, folder: Path, python: str, torch: str, say: Callable[[str], None]) -> None:
        """Prepare to build the choice ``torch`` for the interpreter ``python``."""
        self.folder, self.python, self.torch, self.say = folder, python, torch, say
        self.log = folder / "install.log"
        self.venv = folder / f"venv-{secrets.token_hex(3)}"
        self.uv = shutil.which("uv")

    def build(self) -> None:
        """Build beside, verify, and write the stamp that makes the environment count as ready.

        Raises:
            CannotBuild: with the cause and the cure; nothing is left but the log.
        """
        started = time.monotonic()
        version, _, build = self.torch.rpartition("+")
        needed = NEEDED_GB.get(build, NEEDED_GB_CUDA)
        check_space(self.folder, needed)
        self.say(f"making {self.folder} (up to {needed:.0f} GB; log: {self.log.name} there)")
        self.log.unlink(missing_ok=True)
        wanted = requirements()
        torches = [name for name in wanted if re.match(r"torch(vision)?\b(?!-)", name)]
        index = [] if build == "default" else ["--index-url", INDEX + build]
        try:
            self.run(*self.maker(), str(self.venv))
            self.say("installing torch and torchvision (some GB for a CUDA build)")
            # First and alone: an index of PyTorch's has little else, and the registry other builds.
            self.install(*index, *torches, *([f"torch=={version}"] if version else []))
            self.say("installing the other packages")
            self.install(*wanted)
            self.say("checking that torch and torchvision fit each other")
            self.verify(build)
            # What is stamped as ready must survive a power cut that follows.
            subprocess.run(["sync", "-f", str(self.venv)], check=False)
            stamp = self.folder / "ready"
            if not stamp.exists():  # else another builder, taken for dead, was quicker
                write(stamp, self.venv.name)
                self.say(f"ready after {time.monotonic() - started:.0f} s")
        finally:
            if read(self.folder / "ready") != self.venv.name:
                shutil.rmtree(self.venv, ignore_errors=True)

    def maker(self) -> list[str]:
        """Give the command that makes an empty virtual environment, but for the folder."""
        if self.uv:
            return [self.uv, "venv", "--python", self.python]
        return [self.python, "-m", "venv"]

    def install(self, *requirements: str) -> None:
        """Install requirements (and options of the installer) into the environment."""
        python = str(self.venv / "bin" / "python")
        if self.uv:
            # Compiled here, as pip does: many ranks import from a shared file system later.
            command = [self.uv, "pip", "install", "--python", python, "--compile-bytecode"]
        else:
            command = [python, "-m", "pip", "install", "--no-input", "--progress-bar=off"]
        self.run(*command, *requirements)

    def verify(self, build: str) -> None:
        """Run a torchvision operator, and see that the build is the one asked for."""
        check = [str(self.venv / "bin" / "python"), "-I", "-c", CHECK]
        done = subprocess.run(check, capture_output=True, text=True, check=False)
        with self.log.open("a") as log:
            log.write(f"$ the check in build.py\n{done.stdout}{done.stderr}")
        pair, _, cuda = done.stdout.strip().partition("\n")
        if done.returncode != 0:
            last = done.stderr.strip().rpartition("\n")[2]
            raise CannotBuild(
                f"{pair}, which the installer found, do not work together ({last}). Choose another "
                "pair with ROLLCALL_TORCH, or take away the wheel folder or extra index that has "
                f"half a pair.\nLog: {self.log}"
            )
        if build.startswith("cu") and cuda.replace(".", "") != build[2:]:
            raise CannotBuild(
                f"ROLLCALL_TORCH asks for {build}, but the installer found {pair} (CUDA {cuda}). "
                f"Does an extra index of pip or uv offer another build?\nLog: {self.log}"
            )

    def run(self, *command: str) -> None:
        """Run one step of the installation, its output in the log."""
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
        # Wheels are unpacked beside the environment: /tmp is often too small for CUDA's.
        with (
            self.log.open("a+") as log,
            tempfile.TemporaryDirectory(dir=self.folder, prefix="venv-tmp") as scratch,
        ):
            print("$", *command, file=log, flush=True)
            start = log.tell()
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,  # away from any configuration in the user's directory
                env=clean | {"TMPDIR": scratch, "PYTHONNOUSERSITE": "1"},
                check=False,
            )
            log.seek(start)
            output = log.read()
        if done.returncode != 0:
            raise CannotBuild(f"{self.cause(output)}\nLog: {self.log}")

    def cause(self, output: str) -> str:
        """Tell from what a failed step printed why it failed, and the cure."""
        for pattern, cause in CAUSES:
            if re.search(pattern, output):
                return cause.format(envs=self.folder.parent, python=self.python, torch=self.torch)
        return "the installation failed; its last words: " + " / ".join(output.splitlines()[-2:])


def requirements() -> list[str]:
    """List what pyproject.toml asks for: the dependencies and the ``dev`` extra."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["dev"]]


def check_space(folder: Path, needed_gb: float) -> None:
    """Raise CannotBuild when the file system of ``folder`` has too little free space."""
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < needed_gb:
        raise CannotBuild(
            f"not enough disk space: {folder.parent} has {free_gb:.1f} GB free, and making this "
            f"environment needs about {needed_gb:.0f} GB. Free some space, old environments there "
            "for one, or set ROLLCALL_ENVS to a larger file system."
        )


def read(path: Path) -> str:
    """Read a one-line file; nothing when it is missing."""
    return path.read_text().strip() if path.exists() else ""


def write(path: Path, line: str) -> None:
    """Write a one-line file so that it is whole or absent."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(3)}")
    with beside.open("w") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def prepare(python: str, envs: Path, digest: str, driver: str, chosen: Path, quiet: bool) -> str:
    """Have the environment made, by this process or another one, and return the torch choice."""
    before, after = "py{}.{}-".format(*sys.version_info), f"-{digest}"

    def say(line: str) -> None:
        if not quiet:
            print(f"env/run: {line}", file=sys.stderr, flush=True)

    stamps = envs.glob(f"{before}*{after}/ready")
    ready = {path.parent.name.removeprefix(before).removesuffix(after) for path in stamps}
    torch = choose(os.environ.get("ROLLCALL_TORCH", ""), driver, ready, say)
    folder = envs / f"{before}{torch}{after}"
    folder.mkdir(parents=True, exist_ok=True)
    lock = take_turn(folder, say)
    if lock:
        try:
            Builder(folder, python, torch, say).build()
        except CannotBuild as error:
            write(folder / "failed", str(error))
            raise
        finally:
            lock.release()
    interpreter = folder / read(folder / "ready") / "bin" / "python"
    if not os.access(interpreter, os.X_OK):
        raise CannotBuild(
            f"{folder} was made with {interpreter.resolve()}, which does not run here. Name in "
            "ROLLCALL_PYTHON an interpreter that every node has, or delete that folder."
        )
    chosen.parent.mkdir(exist_ok=True)
    write(chosen, torch)
    return torch


def main() -> None:
    """Make the environment and start env/run again with the arguments that it had."""
    python, envs, digest, driver, chosen, *arguments = sys.argv[1:]

    def stop(number: int, _: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, stop)  # so that the half environment and the lock go with us
    try:
        quiet = arguments[0] == "--quiet"
        torch = prepare(python, Path(envs), digest, driver, Path(chosen), quiet)
    except CannotBuild as error:
        sys.exit(f"env/run: {error}")
    except OSError as error:
        sys.exit(
            f"env/run: {error.strerror}: {error.filename or envs}. Set ROLLCALL_ENVS to a folder "
            "that you may write and that has space."
        )
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and exec would pass that on
    run = [shutil.which("bash") or "/bin/bash", str(ROOT / "env" / "run"), *arguments]
    os.execve(run[0], run, os.environ | {"ROLLCALL_TORCH": torch})


if __name__ == "__main__":
    main()
