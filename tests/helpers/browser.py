"""A headless Chromium, driven through its debugging pipe; see `require` for where it is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = (1280, 800), (390, 844)
"""Width and height of a window, in pixels."""


def require() -> str:
    """The program; skips the test where it is missing, but not in CI."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and "CI" not in os.environ:
        pytest.skip("needs chromium")
    assert found, "CI must have chromium"
    return found


class Page:
    """The one tab of a browser, and what went wrong in it."""

    def __init__(self, write: Callable[[bytes], object], read: Iterator[bytes]) -> None:
        self._write, self._read = write, read
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the browser; events that come meanwhile are kept."""
        self._count += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._count, "method": method, "params": params, **session}
        self._write(json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(next(self._read))
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def open(self, address: str, size: tuple[int, int], scripts: bool = True) -> None:
        """Open a page in a window of this size, and wait until it is loaded."""
        self.events.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=size == PHONE, **metrics)
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(next(self._read)))

    def evaluate(self, script: str) -> Any:
        """Run a line of script beside the page's own, also where those may not run."""
        self.call("Emulation.setScriptExecutionDisabled", value=False)
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors of scripts, lines of the console, and whatever was asked of the network."""
        found = []
        for event in self.events:
            method, params = event.get("method", ""), event.get("params", {})
            if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                found.append(str(params))
            if method == "Network.requestWillBeSent":
                address = str(params["request"]["url"])
                found += [] if address.startswith(("file:", "data:")) else [address]
        return found

    def picture(
        self, path: Path, theme: str = "light", height: int | None = None, scale: float = 1
    ) -> None:
        """Save what the page looks like; a `height` of more than the window shows more of it."""
        scheme = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        more = {}
        if height is not None:
            width = self.evaluate("innerWidth")
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
            more = {"clip": clip, "captureBeyondViewport": True}
        data = self.call("Page.captureScreenshot", format="png", **more)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A tab of a browser that keeps its files in this directory."""
    to_it, ours = os.pipe()
    theirs, from_it = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update"]
    # The browser reads from descriptor 3 and writes to 4.
    line = f'exec "$0" "$@" 3<&{to_it} 4>&{from_it}'
    with subprocess.Popen(
        ["bash", "-c", line, require(), *flags],
        pass_fds=(to_it, from_it),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        os.close(to_it)
        os.close(from_it)
        try:
            yield Page(lambda data: os.write(ours, data), _messages(theirs))
        finally:
            os.close(ours)  # which ends it
            os.close(theirs)
            process.wait(30)


def _messages(descriptor: int) -> Iterator[bytes]:
    waiting = b""
    while data := os.read(descriptor, 2**20):
        *whole, waiting = (waiting + data).split(b"\0")
        yield from whole
