"""`rollcall report [RUN …]`: write a report of runs, or of the newest, as one HTML file.

It shows curves, where the time of the steps went, memory, failures with their logs, attempts and
the configuration, for runs that are live, finished or failed. Several runs, or a sweep, share one
report, with a table of what differs. The file needs no server and no network. --figure draws one
chart for a paper instead.
"""

from collections.abc import Sequence
from pathlib import Path

from rollcall.launch.runs import find
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import size
from rollcall.system.files import write_atomic
from rollcall.tools.report import story


def main(argv: Sequence[str]) -> int:
    """Write the report; return the exit code."""
    parser = find.parser("report", __doc__, nargs="*")
    meaning = "the file to write (default: report-RUN.html in this directory)"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=meaning)
    figure = parser.add_argument_group("one chart")
    add = figure.add_argument
    add("--figure", type=Path, metavar="FILE", help="draw a chart into this .svg, .pdf or .png")
    add("--curve", default="loss", metavar="NAME", help="what: loss (default), val_loss, lr, …")
    add("--x", choices=("step", "time", "samples"), default="step", help="over what it is drawn")
    add("--log", action="store_true", help="a logarithmic axis")
    meaning = "moving average: each step keeps this part of the one before, such as 0.9"
    add("--smooth", type=float, default=0.0, metavar="PART", help=meaning)
    meaning = "mean and standard deviation of the runs that differ only in this key, such as seed"
    add("--over", metavar="KEY", help=meaning)
    options = parser.parse_args(argv)
    words = options.run or [str(run.path) for run in find.find_all(options.root)[-1:]]
    if not words:
        raise RefusedError(f"found no runs in {Path(options.root).absolute()}; name one, or --root")
    if options.figure is None and (options.log or options.smooth or options.over):
        raise RefusedError("--log, --smooth and --over need --figure FILE, which draws one chart")
    for path in filter(None, (options.output, options.figure)):
        if not path.parent.is_dir():  # known before the report is made
            raise RefusedError(f"cannot write {path}: run mkdir -p {path.parent} first")
    if options.figure is not None:
        stories = story.tell(story.chosen(words, options.root))
        from rollcall.tools.report import figures  # imports matplotlib

        figures.write(options.figure, stories, options)
        runs = "1 run" if len(stories) == 1 else f"{len(stories)} runs"
        print(f"{options.figure}: {options.curve} of {runs}")
        return 0
    text, count = build(words, options.root)
    path = options.output or Path(f"report-{Path(words[0]).resolve().name}.html")
    if path.is_dir():  # which write_atomic would set aside
        raise RefusedError(f"{path} is a directory; name a file, such as {path / 'report.html'}")
    try:
        write_atomic(path, text)
    except OSError as error:
        raise RefusedError(f"cannot write {path}: {error.strerror}; choose one with -o") from None
    runs = "1 run" if count == 1 else f"{count} runs"
    print(f"{path}: report of {runs}, {size(len(text))}")
    return 0


def build(words: Sequence[str], root: str) -> tuple[str, int]:
    """Return the HTML of the report of these runs, and how many they are.

    Raises:
        RefusedError: a run does not exist, or matplotlib is not installed.
    """
    runs = story.chosen(words, root)
    from rollcall.tools.report.page import page  # imports matplotlib

    return page(story.tell(runs)), len(runs)
