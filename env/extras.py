"""Install the packages of `env/run --with` beside an environment, then start env/run again.

They go into a separate environment, which finds everything else in the one that it extends.
The packages of that one keep their versions, torch above all. Only env/run starts this file, with
the Python of the environment to extend; it uses only the standard library.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from build import Builder, run_again, say, write
from choose import CannotBuild


@dataclass
class ExtrasBuilder(Builder):
    """Makes one environment that extends another one."""

    base: Path
    packages: list[str]

    def build(self) -> None:
        """Build in a new folder and write its stamp; raise CannotBuild, leaving only the log."""
        say(f"installing {', '.join(self.packages)} in {self.folder} (log: {self.log.name})")
        self.log.unlink(missing_ok=True)
        has_pip = find_spec("pip") is not None
        self.run(self.python, "-m", "venv", *(["--without-pip"] * has_pip), str(self.venv))
        python = str(self.venv / "bin" / "python")
        [site] = self.venv.glob("lib/python3.*/site-packages")
        of_base = str(next(self.base.glob("lib/python3.*/site-packages")))
        # A line with `import` is run; a plain line would not read the .pth files there.
        (site / "rollcall.pth").write_text(f"import site; site.addsitedir({of_base!r})\n")
        kept = self.folder / "kept.txt"
        there = {f"{entry.name}=={entry.version}\n" for entry in distributions()}
        kept.write_text("".join(sorted(there)))
        pip = [self.python if has_pip else python, "-m", "pip", "--python", python, "install"]
        try:
            self.run(*pip, "--no-input", "--progress-bar=off", "-c", str(kept), *self.packages)
        except CannotBuild as error:
            keep = f"The packages of {self.base} keep their versions; for others, use an "
            keep += "environment of your own (submit --python)"
            raise CannotBuild(f"--with {','.join(self.packages)}: {error}\n{keep}") from None
        subprocess.run(["sync", "-f", str(self.venv)], check=False)
        write(self.folder / "ready", self.venv.name)


def main(base: str, place: str, packages: str, *arguments: str) -> None:
    """Make the environment and start env/run again with its original arguments."""

    def prepare() -> str:
        torch = os.environ["ROLLCALL_TORCH"]
        words = [word.strip() for word in packages.split(",") if word.strip()]
        ExtrasBuilder(Path(place), sys.executable, torch, say, Path(base), words).build_in_turn()
        return torch

    run_again(prepare, place, arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
