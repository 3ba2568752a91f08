"""Files that a program names and that the copy of its directory will not have."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollcall.launch.program.find import UserCode
from rollcall.launch.program.python import ProgramError


def links(given: Sequence[str], checkout: Path) -> tuple[str, ...]:
    """Return what `--link` names, relative to the checkout; raise ProgramError if elsewhere."""
    names = []
    for text in given:
        place = Path(os.path.abspath(text))  # noqa: PTH100 - a link stays what it is
        if not place.exists():
            raise ProgramError(f"--link {text}: no such file or directory")
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


def left_out(
    arguments: Sequence[str], copied: Sequence[str], linked: Sequence[str], code: UserCode
) -> Iterator[str]:
    """Yield a sentence for each argument that is a path here, but not in the copy of the code.

    Args:
        copied: the files of the copy, relative to the checkout.
        linked: what the copy has as links, relative to the checkout.
    """
    there = {*copied, *(str(parent) for name in copied for parent in Path(name).parents)}
    told: list[Path] = []
    for text in (value for word in arguments for value in (word, word.partition("=")[2])):
        if not text or text.startswith("-") or Path(text).is_absolute():
            continue
        place = Path(os.path.abspath(code.directory / text))  # noqa: PTH100
        name = os.path.relpath(place, code.checkout)
        is_linked = any(Path(name).is_relative_to(link) for link in linked)
        is_told = any(place.is_relative_to(other) for other in told)
        if name in there or is_linked or is_told or not place.exists():
            continue
        told.append(place)
        why = f"it is outside {code.checkout}. Use"
        if not name.startswith(".."):
            link = os.path.relpath(_to_link(place, code.checkout))
            why = f"git ignores it, or it is hidden. Link it (--link {link}), or use"
        yield f"{text}, named by an argument, will not exist in the job: {why} its absolute path"
