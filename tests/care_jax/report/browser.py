"""Headless Chromium over its debugging pipe: real keys, real sizes, and nothing to install."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # a container's root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
)
_KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Escape": 27}


def executable() -> str | None:
    """Of the browser this machine has."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser; a context manager.

    Args:
        profile: folder for what it writes.
        timeout: seconds for one answer until it is given up.
    """

    def __init__(self, profile: pathlib.Path, timeout: float = 60.0):
        self.messages: list[str] = []  # what the page logged, its errors included
        self._timeout = timeout
        self._buffer, self._number = b"", 0
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [executable(), *_ARGUMENTS, f"--user-data-dir={profile}", "about:blank"]
        wired = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'  # it reads from 3 and writes to 4
        self._process = subprocess.Popen(
            ["bash", "-c", wired, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = None
        target = next(
            each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"
        )
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait()

    def open(self, path: pathlib.Path, *, width: int = 1280, height: int = 900, dark=False) -> None:
        """Shows a file in a window of that size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + self._timeout
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, f"{path} did not open in time"
            time.sleep(0.02)

    def run(self, script: str):
        """The value of an expression in the page."""
        reply = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def press(self, *keys: str) -> None:
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": _KEYS[key]}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point(self, x: float, y: float, *, click: bool = False) -> None:
        kinds = ("mouseMoved", "mousePressed", "mouseReleased") if click else ("mouseMoved",)
        for kind in kinds:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: pathlib.Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]
            if reply.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.messages.append(json.dumps(reply["params"]))

    def _receive(self):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], self._timeout)
            assert ready, "the browser did not answer in time"
            self._buffer += os.read(self._in, 1 << 16)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
