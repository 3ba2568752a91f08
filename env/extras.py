"""Install the packages of `env/run --with` beside an environment, then start env/run again.

They go into a separate environment, which finds everything else in the environment that it extends.
The packages there keep their versions, especially torch. Only env/run starts this file, with the
Python of the environment to extend; it uses only the standard library.
"""

import os
import re
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
    """The builder of one environment that extends another one."""

    base: Path
    packages: list[str]

    def build(self) -> None:
        """Build in a new folder and write its stamp; raise CannotBuild, leaving only the log."""
        say(f"installing {', '.join(self.packages)} in {self.folder} (log: {self.log.name})")
        self.log.unlink(missing_ok=True)
        self.check_network("default")
        has_pip = find_spec("pip") is not None
        without_pip = ["--without-pip"] if has_pip else []
        self.run(self.python, "-m", "venv", *without_pip, str(self.venv))
        python = str(self.venv / "bin" / "python")
        [site] = self.venv.glob("lib/python3.*/site-packages")
        of_base = str(next(self.base.glob("lib/python3.*/site-packages")))
        # Python runs a line with `import`; a plain line would not read the .pth files there.
        (site / "rollcall.pth").write_text(f"import site; site.addsitedir({of_base!r})\n")
        kept = self.folder / "kept.txt"
        pins = {f"{package.name}=={package.version}\n" for package in distributions()}
        kept.write_text("".join(sorted(pins)))
        pip = [self.python if has_pip else python, "-m", "pip", "--python", python, "install"]
        try:
            self.run(*pip, "--no-input", "--progress-bar=off", "-c", str(kept), *self.packages)
        except CannotBuild as error:
            raise CannotBuild(
                f"--with {','.join(self.packages)}: {error}\nThe packages of {self.base} keep "
                "their versions; for others, use your own environment (submit --python)"
            ) from None
        subprocess.run(["sync", "-f", str(self.venv)], check=False)
        write(self.folder / "ready", self.venv.name)

    def _cause(self, output: str) -> str:
        names = "|".join(re.escape(re.split(r"[\[<>=!~; ]", word)[0]) for word in self.packages)
        absent = re.search(rf"No matching distribution found for (({names})\b.*)", output)
        cause = super()._cause(output)
        if absent and "no set of packages" in cause:
            return f"the package registry has no {absent[1]}. Correct the name or the version."
        return cause


def main(base: str, folder: str, packages: str, *arguments: str) -> None:
    """Make the environment and start env/run again with its original arguments."""

    def prepare() -> str:
        torch = os.environ["ROLLCALL_TORCH"]
        words = [word.strip() for word in packages.split(",") if word.strip()]
        ExtrasBuilder(Path(folder), sys.executable, torch, say, Path(base), words).build_in_turn()
        return torch

    run_again(prepare, folder, arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
