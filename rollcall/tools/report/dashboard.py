"""`rollcall dashboard`: serve live reports of all runs to a browser on this machine.

The address that it prints has a random token, and without it nothing is shown; other machines
cannot connect. To look from your laptop, forward the port: ssh -L PORT:127.0.0.1:PORT HOST.
"""

import hmac
import math
import os
import secrets
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from rollcall.cli.parser import parser as command_parser
from rollcall.launch.commands import status
from rollcall.launch.runs import find, states
from rollcall.launch.runs.find import NoRunError
from rollcall.launch.runs.states import Condition
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import clock
from rollcall.records.attempt import AttemptEvent
from rollcall.records.job import Submission
from rollcall.records.phases import Phases
from rollcall.records.run import EVENTS, LoggedStep, Verdict
from rollcall.records.run_dir import RunDir
from rollcall.system.files import changed
from rollcall.tools.report import command

HOST = "127.0.0.1"
FILES = (LoggedStep.FILE, EVENTS, Verdict.FILE, Phases.FILE, AttemptEvent.FILE, Submission.FILE)
"""Files whose changes make a report outdated."""
KEPT = 16
"""Reports that are kept in memory, the last ones that were asked for."""
REFRESH = 30
"""Seconds after which a browser loads a page again."""
HEADERS = {
    **{"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "Refresh": str(REFRESH)},
    **{"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"},
}


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C; return the exit code."""
    parser = command_parser("dashboard", __doc__)
    parser.add_argument("--root", default="runs", help="directory of the runs (default: runs)")
    parser.add_argument("--port", type=int, default=0, help="port (default: any that is free)")
    options = parser.parse_args(argv)
    try:
        server = Server(options.port, options.root)
    except (OSError, OverflowError) as error:
        reason = str(error).rstrip(".")
        text = f"cannot listen on port {options.port}: {reason}; choose another with --port"
        raise RefusedError(text) from None
    print(server.address)
    print("open this address in a browser on this machine; Ctrl-C ends", flush=True)
    with server:
        server.serve_forever()
    return 0


class Server(ThreadingHTTPServer):
    """Serves the list of runs, and the report of each; at most one report is made at a time."""

    daemon_threads = True

    def __init__(self, port: int, root: str) -> None:
        super().__init__((HOST, port), _Handler)
        self.root = root
        self.token = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._report = lru_cache(KEPT)(lambda path, _state: command.build([str(path)], root)[0])

    @property
    def address(self) -> str:
        """The URL of the list of runs."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def runs(self) -> dict[str, RunDir]:
        """Return all runs by the name that their address has."""
        root = Path(self.root).absolute()
        return {str(run.path.relative_to(root)): run for run in find.find_all(self.root)}

    def page(self, name: str) -> str:
        """Return the report of a run, or the list of runs without a name.

        A report is made again only if files or states of the run or its cells have changed.

        Raises:
            RefusedError: there is no such run, or matplotlib is not installed.
        """
        runs = self.runs()
        if not name:
            return _list(runs)
        if name not in runs:
            raise NoRunError("no run has this name")
        parts = find.with_cells(runs[name].path)
        times = [changed(part.path / file) for part in parts for file in FILES]
        states_now = [condition.state for condition in states.look(parts)[0]]
        with self._lock:
            return self._report(parts[0].path, (*times, *states_now))


def _list(runs: dict[str, RunDir]) -> str:
    from rollcall.tools.report.page import listing  # imports matplotlib

    conditions, _ = states.look([*runs.values()])
    sweeps = {run.path for run in runs.values()} & {run.path.parent for run in runs.values()}
    # The run or sweep that changed last comes first, and cells below their sweep.
    tops = [run.path.parent if run.path.parent in sweeps else run.path for run in runs.values()]
    newest = {path: number for number, path in enumerate(tops)}
    rows = []
    for top, (name, run), condition in zip(tops, runs.items(), conditions, strict=True):
        shown = Condition("sweep") if run.path in sweeps else condition
        cells = status.cells_of(shown, states.progress(run, shown))
        del cells[""]  # the note, which the report has too
        attempt = find.newest_attempt(run)
        cells["ranks"] = str(attempt.ranks) if attempt else ""
        cells["last sign"] = clock(max(changed(run.metrics), changed(run.events)) or math.inf)[5:16]
        row = (quote(os.fsencode(name)), name, _spark(run), cells)
        rows.append((-newest[top], run.path, row))
    return listing([row for *_, row in sorted(rows, key=lambda row: row[:2])])


def _spark(run: RunDir) -> str:
    """Return the points of a curve of the newest losses, in a box of 96 x 24."""
    losses = [step.loss for step in LoggedStep.last(run.path) if abs(step.loss) < math.inf][-96:]
    low, high = min(losses, default=0.0), max(losses, default=0.0)
    across, down = 96 / max(len(losses) - 1, 1), 20 / ((high - low) or 1.0)
    points = enumerate(losses if len(losses) > 1 else ())
    return " ".join(f"{at * across:.1f},{2 + (high - loss) * down:.1f}" for at, loss in points)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 60  # seconds for a request: others on this machine can connect too
    server_version, sys_version = "rollcall", ""

    def do_GET(self) -> None:
        _, token, *rest = self.path.partition("?")[0].split("/")
        port, expected = self.server.server_address[1], self.server.token
        is_here = self.headers.get("Host") in (f"{HOST}:{port}", f"localhost:{port}")
        knows = hmac.compare_digest(token.encode(), expected.encode())
        if not (rest and is_here and knows):
            return self._answer(403, "open the address that rollcall dashboard has printed")
        try:
            name = unquote("/".join(rest), errors="surrogateescape")
            return self._answer(200, self.server.page(name), "html")
        except RefusedError as error:
            return self._answer(404 if isinstance(error, NoRunError) else 500, str(error))
        except Exception:
            traceback.print_exc(file=sys.stderr)
            return self._answer(500, "the report could not be made; the terminal says why")

    def _answer(self, code: int, text: str, kind: str = "plain") -> None:
        body = text.encode(errors="replace")
        self.send_response(code)
        headers = {"Content-Type": f"text/{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for header in (HEADERS | headers).items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing: the addresses have the token."""
