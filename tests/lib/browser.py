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
    """The path of the browser's program, or None if no browser is installed."""
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    return None


class Browser:
    """One tab of a browser with a profile of its own."""

    def __init__(self, program: str, profile: Path) -> None:
        self.number = 0
        """The number of the last message to the browser."""
        self.session = ""
        self.unread = b""
        """The beginning of a message that has not arrived completely."""
        self.seen: list[dict[str, Any]] = []
        """Events so far."""

        # The browser reads on descriptor 3 what is written to `write`, and writes on 4 to `read`.
        browser_input, self.write = os.pipe()
        self.read, browser_output = os.pipe()
        move_descriptors = f'exec 3<&{browser_input} 4>&{browser_output}; exec "$@"'
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", move_descriptors, "bash", *command],
            pass_fds=(browser_input, browser_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_input)
        os.close(browser_output)

        # One tab, whose events are reported.
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
            received = self._next_message()
            if received.get("id") == self.number:
                assert "error" not in received, received["error"]
                result: dict[str, Any] = received["result"]
                return result
            self.seen.append(received)

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            part = os.read(self.read, 2**16)
            assert part, "the browser has ended"
            self.unread += part
        content, _, self.unread = self.unread.partition(b"\0")
        message: dict[str, Any] = json.loads(content)
        return message

    def open(self, path: Path) -> None:
        """Load a file and wait until its first frames are drawn."""
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.seen):
            self.seen.append(self._next_message())
        self.seen = [event for event in self.seen if event.get("method") != "Page.loadEventFired"]
        drawn = "new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))"
        self.call("Runtime.evaluate", expression=drawn, awaitPromise=True)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wrong(self) -> list[Any]:
        """Errors of the page so far: exceptions, and what the browser wrote to its console."""
        self.value("0")  # events come before answers
        return [event["params"] for event in self.seen if event.get("method") in WRONG]

    def asked(self) -> list[str]:
        """The addresses that the page has asked for so far."""
        addresses = []
        for event in self.seen:
            if event.get("method") == "Network.requestWillBeSent":
                addresses.append(event["params"]["request"]["url"])
        return addresses

    def close(self) -> None:
        """End the browser and wait for it."""
        self.session = ""
        self.call("Browser.close")
        self.process.wait(timeout=30)
        os.close(self.write)
        os.close(self.read)
