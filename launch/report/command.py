"""`rollcall report [RUN …]`: write a report of runs, or of the newest, as one HTML file.

It shows curves, where the time of the steps went, memory, failures with their logs, attempts and
the configuration, for runs that are live, finished or failed. Several runs, or a sweep, share one
report, with a table of what differs. The file needs no server and no network.
"""

from collections.abc import Sequence
from pathlib import Path

from rollcall.launch.report import story
from rollcall.launch.runs import find
from rollcall.records.files import write_atomic
from rollcall.refusal import RefusedError
from rollcall.text import size


def main(argv: Sequence[str]) -> int:
    """Write the report; return the exit code."""
    parser = find.parser("report", __doc__, nargs="*")
    meaning = "the file to write (default: report-RUN.html in this directory)"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=meaning)
    options = parser.parse_args(argv)
    words = options.run or [str(run.path) for run in find.find_all(options.root)[-1:]]
    if not words:
        raise RefusedError(f"found no runs in {options.root}; name a run, or its --root")
    text, count = build(words, options.root)
    path = options.output or Path(f"report-{Path(words[0]).resolve().name}.html")
    if path.is_dir():  # which write_atomic would set aside
        raise RefusedError(f"{path} is a directory; name a file, such as {path / 'report.html'}")
    try:
        write_atomic(path, text)
    except OSError as error:
        raise RefusedError(f"cannot write {path}: {error.strerror}; choose one with -o") from None
    print(f"{path}: report of {count} run{'s' * (count > 1)}, {size(len(text))}")
    return 0


def build(words: Sequence[str], root: str) -> tuple[str, int]:
    """Return the HTML of the report of these runs, and how many they are.

    Raises:
        RefusedError: a run does not exist, or matplotlib is not installed.
    """
    found = story.chosen(words, root)
    from rollcall.launch.report.page import page  # imports matplotlib

    return page(story.tell(found)), len(found)
