"""Find and read the files that a user names."""

import glob
from pathlib import Path

from rollcall.messages.refusal import ConfigError, refusing


def find(patterns: str, key: str = "data.path") -> list[Path]:
    """Return the files of comma-separated patterns and directories; ConfigError for one without."""
    all_files: list[Path] = []
    for pattern in patterns.split(","):
        names = sorted(glob.glob(pattern.strip(), recursive=True))  # noqa: PTH207 (may be absolute)
        matches = [Path(name) for name in names]
        nested = [sorted(match.rglob("*")) if match.is_dir() else [match] for match in matches]
        if not (files := [path for paths in nested for path in paths if path.is_file()]):
            how = "is in" if matches else "matches"
            raise ConfigError(f"{key}: no file {how} '{pattern.strip()}'; name a file or folder")
        all_files += files
    return all_files


def read(path: Path) -> bytes:
    """Return the content of a file; ConfigError if it cannot be read."""
    with refusing(f"{path}: cannot read"):
        return path.read_bytes()
