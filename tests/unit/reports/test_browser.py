# SPDX-License-Identifier: Apache-2.0
"""The report in a real headless browser, at the width of a desk and of a phone, with no network."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import BROWSERS
from verl_ext.compare import build
from verl_ext.reports.compared_runs import find

BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.browser


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

    def open(self, path, width, height=900):
        """Show a file at a width, and wait until its charts are drawn."""
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


@pytest.fixture
def browser(tmp_path):
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


def test_the_report_as_people_see_it(root, browser, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_ext.compare.draw_all", lambda comparison, folder: [])  # not looked at here
    output = tmp_path / "report"
    build(find(root, []), output, "A comparison", "cpu/grpo", None)
    page = tmp_path / "elsewhere.html"
    shutil.copy(output / "index.html", page)  # alone, without the files beside it
    for width in (1400, 400):
        browser.events.clear()
        browser.open(page, width)
        if folder := os.environ.get("VERL_EXT_SCREENSHOTS"):
            browser.screenshot(f"{folder}/report-{width}.png")
        seen = browser.evaluate("""({
            width: innerWidth,
            overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
            drawn: Number(document.documentElement.dataset.drawn),
            plots: [...document.querySelectorAll('.plot')].map(p => {
                const outer = p.getBoundingClientRect();
                const inner = p.querySelector('svg.main-svg').getBoundingClientRect();
                return {id: p.id, outer: outer.width, inner: inner.width, left: outer.left, right: outer.right,
                        paths: p.querySelectorAll('.scatterlayer path, .barlayer path').length};
            }),
        })""")
        assert seen["width"] == width
        assert seen["overflow"] == 0, "the page scrolls sideways"
        assert seen["drawn"] == len(seen["plots"]) == 7
        for plot in seen["plots"]:
            assert abs(plot["outer"] - plot["inner"]) <= 1 and plot["left"] >= 0 and plot["right"] <= width, plot
            assert plot["inner"] > (250 if width == 400 else 500) and plot["paths"] > 0, plot
        columns = browser.evaluate(
            "new Set([...document.querySelectorAll('.plot')].map(p => Math.round(p.getBoundingClientRect().left))).size"
        )
        assert columns == (2 if width == 1400 else 1)
        requests = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
        assert requests and all(url.startswith(("file:", "data:", "blob:")) for url in requests), requests
        problems = [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"
                    or e["method"] == "Log.entryAdded" and e["params"]["entry"]["level"] == "error"]  # fmt: skip
        assert not problems

    def column(n):
        rows = "[...document.querySelectorAll('#recipes tbody tr')]"
        return browser.evaluate(f"{rows}.map(r => r.cells[{n}].dataset.key)")

    browser.evaluate("document.querySelectorAll('#recipes th')[2].click()")
    rising = [float(key) for key in column(2)]
    assert rising == sorted(rising) and len(set(rising)) == 3
    browser.evaluate("document.querySelectorAll('#recipes th')[2].click()")
    assert [float(key) for key in column(2)] == rising[::-1]
    browser.evaluate("document.querySelectorAll('#recipes th')[0].click()")
    assert column(0) == ["cpu/dapo", "cpu/grpo", "cpu/sara"]

    visible = "document.getElementById('accuracy-rollouts').data.filter(t => t.visible !== false).length"
    before = browser.evaluate(visible)
    browser.evaluate("document.querySelector('.chips button[data-recipe=\"cpu/sara\"]').click()")
    assert browser.evaluate(visible) == before - 2  # its line and its band
