# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, for tests that look at a page."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.conftest import BROWSERS

BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


class Browser:
    """Chromium over its DevTools pipe: commands in, answers and events out, JSON ended by a null byte."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def as_3_and_4():
            a, b = os.dup(to_browser), os.dup(from_browser)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
             f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=as_3_and_4, close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(profile)},
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self.events = 0, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method, **parameters):
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _read(self):
        while b"\0" not in self._rest:
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has gone"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def evaluate(self, expression):
        """The value of a JavaScript expression; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, path, width, height=900, dark=False):
        """Show a file at a width, in light or dark mode, and wait until its charts are drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.evaluate("""new Promise((done, fail) => {
            const started = Date.now();
            (function look() {
                if (document.documentElement?.dataset.drawn) return setTimeout(done, 100);
                if (Date.now() - started > 60000) return fail('not drawn');
                setTimeout(look, 50);
            })();
        })""")

    def screenshot(self, path):
        """The whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        os.close(self._out)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._in)
