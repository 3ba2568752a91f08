"""Build rollcall's wheel and install it; write small wheels."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from checkout import ROOT


def copy_checkout(root: Path) -> Path:
    """Copy the checkout's files, without .git and without what git ignores; return the copy."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.check_output(listed, text=True).split("\0")[:-1]:
        if (source := ROOT / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, root / name)
    return root


def build_wheel(folder: Path, source: Path | None = None) -> Path:
    """Build the wheel of a clean copy of the checkout, or of `source`, without the network."""
    source = source or copy_checkout(folder / "src")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(folder), str(source)], check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


def build_sdist(folder: Path) -> Path:
    """Build the sdist of a clean copy of the checkout; no network is needed."""
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    words = [sys.executable, "-c", build, str(folder)]
    subprocess.run(words, cwd=copy_checkout(folder / "src"), check=True, capture_output=True)
    [built] = folder.glob("*.tar.gz")
    return built


def install(wheel: Path) -> Path:
    """Install a wheel beside it; return the directory for PYTHONPATH, with the script in bin/."""
    site = wheel.parent / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, capture_output=True)
    return site


def wheel(folder: Path, name: str, needs: str = "") -> None:
    """Write a wheel with one module, which may need another package."""
    folder.mkdir(exist_ok=True)
    about = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    files = {
        f"{name}.py": "VALUE = 1\n",
        f"{about}/METADATA": metadata + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in [*files.items(), (f"{about}/RECORD", record)]:
            archive.writestr(path, text)
