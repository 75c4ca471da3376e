"""A real browser without a screen: Debian's Chromium, driven by the DevTools protocol."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import DEVNULL, PIPE
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
DISABLED = ("gpu", "quic", "background-networking", "component-update", "sync")
FLAGS = ("--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in DISABLED))
PATIENCE = 60.0


def installed() -> str:
    """The path of a browser; empty if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), "")


class Page:
    """One page of a browser. `problems` holds console errors, exceptions and requests that left for the network."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0
        self.problems = list[str]()
        self.requests = list[str]()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_fault: object) -> None:
        self._socket.close()

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def open(self, address: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until its charts are drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")
        self.wait("[...document.querySelectorAll('.plot')].every((plot) => plot.childNodes.length)")

    def wait(self, condition: str) -> None:
        limit = time.monotonic() + PATIENCE
        while not self.eval(condition):
            assert time.monotonic() < limit, f"never came true: {condition}"
            time.sleep(0.05)

    def open_details(self) -> None:
        """Open everything that is folded, and wait until its tables are filled."""
        self.eval("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        self.wait("[...document.querySelectorAll('figure details .scroll')].every((box) => box.childNodes.length)")

    def eval(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **common, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def _note(self, message: dict[str, Any]) -> None:
        what = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(what["exceptionDetails"])[:1000])
            case "Runtime.consoleAPICalled" if what["type"] in ("error", "warning"):
                self.problems.append(json.dumps(what["args"])[:1000])
            case "Log.entryAdded" if what["entry"]["level"] in ("error", "warning"):
                self.problems.append(what["entry"]["text"] + " " + what["entry"].get("url", ""))
            case "Network.requestWillBeSent":
                self.requests.append(what["request"]["url"][:200])


@contextmanager
def browsing() -> Iterator[Page]:
    """A new browser with one empty page. It is gone afterwards, with all that it has kept."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [installed(), *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=DEVNULL, stderr=PIPE, text=True, start_new_session=True)
        assert process.stderr is not None
        try:
            address = next(line.split()[-1] for line in process.stderr if "DevTools listening on" in line)
            with connect(address, max_size=None, proxy=None) as whole:
                whole.send(json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}))
                while (answer := json.loads(whole.recv(timeout=PATIENCE))).get("id") != 1:
                    pass
                target = answer["result"]["targetId"]
                page = address.partition("/devtools/")[0] + f"/devtools/page/{target}"
                with connect(page, max_size=None, proxy=None) as socket, Page(socket) as opened:
                    yield opened
                whole.send(json.dumps({"id": 2, "method": "Browser.close"}))
                process.wait(timeout=PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its helpers would outlive it, and keep its pipe open
            process.wait()
            process.stderr.close()
