"""A headless Chromium, driven through its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from dalsegno.system.hanging_calls import slowness

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--disable-default-apps", "--disable-extensions", "--disable-dev-shm-usage",
    "--no-first-run", "--hide-scrollbars", "--mute-audio", "--remote-debugging-pipe",
)  # fmt: skip
ANSWER_S = 60.0
LIGHT, DARK = "light", "dark"


class BrowserFailed(AssertionError):
    """The browser, or the page in it, did something unexpected."""


@dataclass
class Tab:
    """A page in the browser. `errors` are messages of its console and exceptions of its scripts."""

    browser: Browser
    session: str
    errors: list[str] = field(default_factory=list)

    def call(self, method: str, **arguments: object) -> dict[str, Any]:
        return self.browser.call(method, arguments, self.session)

    def open(self, url: str) -> None:
        """Load a page and wait until its scripts have run."""
        answer = self.call("Page.navigate", url=url)
        if answer.get("errorText"):
            raise BrowserFailed(f"{url}: {answer['errorText']}")
        self.until("document.readyState === 'complete' && location.pathname !== '/login'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserFailed(f"{script}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def until(self, script: str, timeout_s: float = ANSWER_S) -> float:
        """Wait until an expression is true and return how long that took."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(BrowserFailed):  # the page is being replaced by another one
                if self.run(f"Promise.resolve({script}).then(Boolean)"):
                    return time.monotonic() - began
            if time.monotonic() - began > timeout_s * slowness():
                shown = self.run("document.body.innerText.slice(0, 2000)")
                raise BrowserFailed(f"never true: {script}\nerrors: {self.errors}\n{shown}")
            self.browser.listen(0.03)

    def size(self, width: int, height: int, *, phone: bool = False, scheme: str = LIGHT) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=phone,
                  deviceScaleFactor=2 if phone else 1)  # fmt: skip
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


def barriers(tab: Tab) -> list[list[str]]:
    """Return the accessibility problems that axe finds in the open page."""
    tab.call("Runtime.evaluate", expression=(resources.files("axe_core_python") / "axe.min.js").read_text())
    found = tab.run("axe.run().then(found => found.violations.map(each => [each.impact, each.id, "
                    "each.nodes[0].html.slice(0, 200)]))")  # fmt: skip
    return [each for each in found if each[0] in ("serious", "critical")]


class Browser:
    """A running Chromium with an empty profile."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        argv = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # Chromium reads its requests from descriptor 3 and writes its answers to 4.
        shell = ["bash", "-c", 'exec "$@" 3<&"$DS_IN" 4>&"$DS_OUT"', "-", *argv]
        env = {**os.environ, "DS_IN": str(to_browser), "DS_OUT": str(from_browser), "HOME": str(profile)}
        self.process = subprocess.Popen(
            shell, env=env, pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._received = 0, b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait(10)
        os.close(self._write)
        os.close(self._read)

    def tab(self) -> Tab:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        return tab

    def call(self, method: str, arguments: dict[str, Any], session: str = "") -> dict[str, Any]:
        self._number += 1
        number = self._number
        request = {"id": number, "method": method, "params": arguments, **({"sessionId": session} if session else {})}
        os.write(self._write, json.dumps(request).encode() + b"\0")
        until = time.monotonic() + ANSWER_S * slowness()
        while number not in self._answers:
            if time.monotonic() > until or self.process.poll() is not None:
                raise BrowserFailed(f"no answer to {method}")
            self.listen(1.0)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserFailed(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def listen(self, most_s: float) -> None:
        """Process the messages that arrive within this time."""
        if not select.select([self._read], [], [], most_s)[0]:
            return
        data = os.read(self._read, 1 << 20)
        if not data:
            raise BrowserFailed("the browser has ended")
        *whole, self._received = (self._received + data).split(b"\0")
        for text in whole:
            self._take(json.loads(text))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        tab, what = self._tabs.get(message.get("sessionId", "")), message.get("params", {})
        if tab is None:
            return
        if message["method"] == "Runtime.exceptionThrown":
            tab.errors.append(str(what["exceptionDetails"].get("exception", {}).get("description")))
        elif message["method"] == "Runtime.consoleAPICalled" and what["type"] in ("error", "assert"):
            tab.errors.append(str([each.get("value") for each in what["args"]]))
        elif message["method"] == "Log.entryAdded" and what["entry"]["level"] == "error":
            tab.errors.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a running browser; afterwards, end it and remove its profile."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise BrowserFailed("no chromium; `./dalsegno setup --dev` installs it")
    profile = Path(tempfile.mkdtemp(prefix="ds-chromium-"))
    browser = Browser(program, profile)
    try:
        yield browser
    finally:
        browser.close()
        shutil.rmtree(profile, ignore_errors=True)
