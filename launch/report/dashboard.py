"""`rollcall dashboard`: serve live reports of all runs to a browser on this machine.

The address that it prints has a random token, and without it nothing is shown; other machines
cannot connect. To look from your laptop, forward the port: ssh -L PORT:127.0.0.1:PORT HOST.
"""

import argparse
import hmac
import secrets
import sys
import threading
import traceback
from collections.abc import Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

from rollcall.launch.report import command, story
from rollcall.launch.runs import find, states
from rollcall.records.files import changed
from rollcall.records.phases import Phases
from rollcall.refusal import RefusedError
from rollcall.run_dir import RunDir

HOST = "127.0.0.1"
REFRESH = 30
"""Seconds after which a browser loads the report of a live run again."""


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C; return the exit code."""
    parser = argparse.ArgumentParser(prog="rollcall dashboard", description=__doc__)
    parser.add_argument("--root", default="runs", help="directory of the runs (default: runs)")
    parser.add_argument("--port", type=int, default=0, help="port (default: any that is free)")
    options = parser.parse_args(argv)
    try:
        server = Server(options.port, options.root)
    except (OSError, OverflowError) as error:
        raise RefusedError(
            f"cannot listen on port {options.port}: {error}; choose another"
        ) from None
    print(
        f"{server.address}\nopen this address in a browser on this machine; Ctrl-C ends", flush=True
    )
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
        self._made: dict[str, tuple[float, bytes, bool]] = {}

    @property
    def address(self) -> str:
        """The URL of the list of runs."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def runs(self) -> dict[str, RunDir]:
        """Return all runs by the name that their address has."""
        found = find.find_all(self.root)
        paths = {run.path for run in found}
        names = [
            f"{run.path.parent.name}/{run.name}" if run.path.parent in paths else run.name
            for run in found
        ]
        return dict(zip(names, found, strict=True))

    def report(self, name: str) -> tuple[bytes, bool]:
        """Return the report of a run, and whether the run is live; KeyError if there is none.

        It is made again only if the files of the run have changed.
        """
        run = self.runs()[name]
        with self._lock:
            (condition,), _ = states.look([run])
            files = (run.metrics, run.events, run.verdict, run.job, run.path / Phases.FILE)
            key = max(map(changed, files)) + condition.is_live / 2
            if name not in self._made or self._made[name][0] != key:
                page = command.build(story.chosen([str(run.path)], self.root)).encode()
                self._made[name] = (key, page, condition.is_live)
            return self._made[name][1:]


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "rollcall", ""

    def do_GET(self) -> None:
        _, token, *rest = self.path.partition("?")[0].split("/")
        port = self.server.server_address[1]
        is_here = self.headers.get("Host") in (f"{HOST}:{port}", f"localhost:{port}")
        if not is_here or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(403, b"open the address that rollcall dashboard has printed\n", "plain")
            return
        name, is_live = unquote("/".join(rest)), True
        try:
            page = self._list() if not name else b""
            page, is_live = (page, True) if page else self.server.report(name)
        except KeyError:
            self._answer(404, b"there is no such run\n", "plain")
        except RefusedError as error:
            self._answer(500, f"{error}\n".encode(), "plain")
        except Exception:
            traceback.print_exc(file=sys.stderr)
            self._answer(500, b"the report could not be made; the terminal says why\n", "plain")
        else:
            self._answer(200, page, "html", *([("Refresh", str(REFRESH))] if is_live else []))

    def _list(self) -> bytes:
        from rollcall.launch.report.page import listing

        runs = self.server.runs()
        conditions, _ = states.look(list(runs.values()))
        rows = [
            (quote(name), escape(name), condition.state, states.progress(run))
            for (name, run), condition in zip(runs.items(), conditions, strict=True)
        ]
        return listing(rows[::-1]).encode(errors="replace")

    def _answer(self, code: int, body: bytes, kind: str, *headers: tuple[str, str]) -> None:
        self.send_response(code)
        fixed = {
            "Content-Type": f"text/{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            **{"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"},
            **{"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"},
        }
        for header in (*fixed.items(), *headers):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing: the addresses have the token."""
