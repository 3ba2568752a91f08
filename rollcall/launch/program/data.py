"""Files that a program names and that the copy of its directory will not have."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path

from rollcall.launch.program.find import UserCode
from rollcall.launch.program.python import ProgramError

LARGE = 1_000_000
"""Bytes from which on an ignored path is named, though the script does not name it."""
NO_DATA = re.compile(r"(^|/)(\.|__pycache__/|node_modules/|build/|dist/)|\.(egg-info/|so|pyc|log)$")
"""Matches files and directories that git ignores in many checkouts, and that no script reads."""


def links(given: Sequence[str], checkout: Path) -> tuple[str, ...]:
    """Return what `--link` names, relative to the checkout; raise ProgramError if elsewhere."""
    names = []
    for text in given:
        place = Path(os.path.abspath(text))  # noqa: PTH100 - a link stays what it is
        if not place.exists():
            raise ProgramError(f"--link {text}: no such file or directory in {Path.cwd()}")
        if not place.is_relative_to(checkout) or place == checkout:
            advice = "name other places by their absolute path in the program's arguments"
            raise ProgramError(f"--link {text}: expected a path in {checkout}; {advice}")
        names.append(str(_to_link(place, checkout).relative_to(checkout)))
    within = {name for name in names if {*map(str, Path(name).parents)} & {*names}}
    return tuple(name for name in dict.fromkeys(names) if name not in within)


def _to_link(place: Path, checkout: Path) -> Path:
    """Return what must be linked to have a path: the first symbolic link on the way, or itself."""
    inside = [step for step in reversed(place.parents) if checkout in step.parents]
    return next((step for step in inside if step.is_symlink()), place)


def named(arguments: Sequence[str], code: UserCode) -> dict[str, str]:
    """Return the arguments that are relative paths of something, by its name in the checkout."""
    paths: dict[str, str] = {}
    for text in (value for word in arguments for value in (word, word.partition("=")[2])):
        if text and not text.startswith("-") and not Path(text).is_absolute():
            path = os.path.abspath(code.directory / text)  # noqa: PTH100
            if os.path.exists(path):  # noqa: PTH110 - Path raises if it may not look
                paths.setdefault(os.path.relpath(path, code.checkout), text)
    return paths


def left_out(copied: Sequence[str], linked: Sequence[str], code: UserCode) -> Iterator[str]:
    """Yield a sentence for each argument that is a path here, but not in the copy of the code.

    The files that are `copied` and the paths that are `linked` are relative to the checkout.
    """
    there = {*copied, *(str(parent) for name in copied for parent in Path(name).parents)}
    reported: list[str] = []
    for name, text in named(code.words[1:], code).items():
        if name in there or any(Path(name).is_relative_to(other) for other in (*linked, *reported)):
            continue
        reported.append(name)
        why = f"it is outside {code.checkout}. Use"
        if not name.startswith(".."):
            link = os.path.relpath(_to_link(code.checkout / name, code.checkout))
            why = f"git ignores it, or it is hidden. Link it (--link {link}), or use"
        yield f"{text}, named by an argument, will not exist in the job: {why} its absolute path"


def ignored(names: Iterable[str], reported: Iterable[str], code: UserCode) -> list[str]:
    """List the paths that git ignores and a script may read: it names them, or they are large."""
    text = code.script.read_text(errors="replace") if code.script else ""
    paths: list[Path] = []
    known = [code.checkout / name for name in reported]
    for path in (code.checkout / name for name in names if not NO_DATA.search(name)):
        is_named = re.search(rf"[\"'/]{re.escape(path.name)}\b", text)
        is_reported = {path, *path.parents}.intersection([*known, *paths])
        if not (is_reported or any(path in other.parents for other in known)):
            paths += [path] if is_named or _is_large(path) else []
    return list(map(os.path.relpath, paths))


def _is_large(path: Path) -> bool:
    files = (f"{folder}/{name}" for folder, _, names in os.walk(path) for name in names)
    sizes = (os.lstat(file).st_size for file in chain([str(path)], files))
    with contextlib.suppress(OSError):  # it is gone by now
        return any(total > LARGE for total in accumulate(sizes))
    return False
