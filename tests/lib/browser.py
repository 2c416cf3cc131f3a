"""A real Chromium without a window, driven through its own pipe.

No library is needed: the browser reads and writes JSON messages, each ended by a zero byte, on its
file descriptors 3 and 4 (`--remote-debugging-pipe`, the DevTools protocol).
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WRONG = ("Runtime.exceptionThrown", "Log.entryAdded")


def find_chromium() -> str | None:
    """The browser's program, or None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One tab of a browser with a profile of its own."""

    def __init__(self, program: str, profile: Path) -> None:
        self.number, self.session = 0, ""
        # The browser reads what is written to `write`, on 3, and writes on 4 what `read` gets.
        theirs_in, self.write = os.pipe()
        self.read, theirs_out = os.pipe()
        moved = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        words = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        words += ["--disable-dev-shm-usage", "--disable-background-networking"]
        words += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", moved, "bash", *words],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.left = b""
        self.seen: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser and wait for its answer; events on the way are kept in `seen`."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.number:
                assert "error" not in found, found["error"]
                result: dict[str, Any] = found["result"]
                return result
            self.seen.append(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.left:
            part = os.read(self.read, 2**16)
            assert part, "the browser has ended"
            self.left += part
        first, _, self.left = self.left.partition(b"\0")
        found: dict[str, Any] = json.loads(first)
        return found

    def open(self, path: Path) -> None:
        """Load a file and wait until its first frames are drawn."""
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.seen):
            self.seen.append(self._next())
        self.seen = [event for event in self.seen if event.get("method") != "Page.loadEventFired"]
        drawn = "new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))"
        self.call("Runtime.evaluate", expression=drawn, awaitPromise=True)

    def value(self, expression: str) -> Any:
        """What an expression is worth on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wrong(self) -> list[Any]:
        """Errors of the page so far: exceptions, and what the browser wrote to its console."""
        self.value("0")  # events come before answers
        return [one["params"] for one in self.seen if one.get("method") in WRONG]

    def asked(self) -> list[str]:
        """The addresses that the page has asked for so far."""
        kind = "Network.requestWillBeSent"
        return [one["params"]["request"]["url"] for one in self.seen if one.get("method") == kind]

    def close(self) -> None:
        """End the browser and wait for it."""
        self.session = ""
        self.call("Browser.close")
        self.process.wait(timeout=30)
        os.close(self.write)
        os.close(self.read)
