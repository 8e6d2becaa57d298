"""A headless Chromium, driven over its own pipe (Chrome DevTools Protocol, `--remote-debugging-pipe`): no driver to install.

Debian and Ubuntu have it as `chromium` (`apt-get install chromium`); `REPERTORY_CHROMIUM` names another one.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
"""For one answer; a machine may be busy."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_READS, _WRITES = 3, 4
"""The descriptors on which Chromium expects its pipe."""
_ABOVE = 10
_KEYS = {"Enter": 13, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39}
# What keeps it from asking, calling home or using a GPU; as root it has no sandbox.
_FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--force-color-profile=srgb", "--force-device-scale-factor=1", "about:blank",
)  # fmt: skip


def find_chromium() -> str | None:
    """Path of an installed browser, or None."""
    named = os.environ.get("REPERTORY_CHROMIUM")
    return named or next((path for path in map(shutil.which, _NAMES) if path), None)


class Browser:
    """A browser with one page. `complaints` are the page's errors, warnings, and what its policy forbade."""

    def __init__(self, path: str, folder: Path) -> None:
        self.complaints: list[str] = []
        self.requested: list[str] = []
        """Every address that the page asked for."""
        self._number = 0
        self._held = b""
        to_child, from_child = _pipe(), _pipe()
        actions = [
            (os.POSIX_SPAWN_OPEN, 2, str(folder / "chromium.log"), os.O_WRONLY | os.O_CREAT, 0o644),
            (os.POSIX_SPAWN_DUP2, to_child[0], _READS),
            (os.POSIX_SPAWN_DUP2, from_child[1], _WRITES),
        ]
        arguments = [path, f"--user-data-dir={folder / 'profile'}", *_FLAGS]
        self._pid = os.posix_spawn(path, arguments, os.environ, file_actions=actions, setpgroup=0)
        os.close(to_child[0])
        os.close(from_child[1])
        self._to, self._from = to_child[1], from_child[0]
        self._session: str | None = None
        try:
            self._open_page()
        except BaseException:
            self.close()
            raise

    def start_over(self) -> None:
        """As after the start: nothing open, nothing said, a window of 1280 by 900 in light colours."""
        self._send("Page.navigate", url="about:blank")
        self.resize(1280, 900)
        self.prefer("light")
        self.wait_until("document.readyState === 'complete' && location.href === 'about:blank'")
        self.complaints.clear()
        self.requested.clear()

    def goto(self, path: Path) -> None:
        """Open a file and wait until it is loaded."""
        self._send("Page.navigate", url=path.as_uri())
        self.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window's inside."""
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def run(self, script: str) -> Any:
        """The value of an expression, or what the promise it makes comes to."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, condition: str) -> None:
        """Return once `condition` holds; it is tried whenever the browser has time to draw."""
        ends = time.monotonic() + DEADLINE_S
        drawn = f"new Promise(done => requestAnimationFrame(() => setTimeout(() => done({condition}))))"
        while not self.run(drawn):
            assert time.monotonic() < ends, f"never: {condition}"

    def text(self, selector: str) -> str:
        """What can be read in an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element, where a person would."""
        middle = (
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            " found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        x, y = self.run(middle)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def move(self, x: float, y: float) -> None:
        """Put the mouse somewhere."""
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def wheel(self, x: float, y: float, by: float, *, ctrl: bool = False) -> None:
        """Turn the mouse's wheel."""
        held = 2 if ctrl else 0
        self._send("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by, modifiers=held)

    def press(self, key: str) -> None:
        """Press and release a key; a single letter is typed."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        code = _KEYS.get(key, ord(key[0].upper()))
        self._send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self._send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, *, whole: bool = False) -> bytes:
        """Write what is in view, or the whole page, as PNG; return it."""
        answer = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        picture = base64.b64decode(answer["data"])
        path.write_bytes(picture)
        return picture

    def close(self) -> None:
        """End the browser and everything that it has started."""
        os.close(self._to)
        os.close(self._from)
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _open_page(self) -> None:
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next(ends)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def _next(self, ends: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._from], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"the browser has said nothing for {DEADLINE_S:.0f} s"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._held += data
        line, _, self._held = self._held.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not among the descriptors that the browser is to find it on."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
