# SPDX-License-Identifier: Apache-2.0
"""The reports in a real headless browser: widths of a desk and of a phone, light and dark, with no network."""

import os
import shutil

import pytest

from tests.browser import Browser
from tests.unit.runs.run_folders import add_prompts
from verl_ext.compare import build
from verl_ext.reports.compared_runs import find
from verl_ext.reports.run_page import run_page
from verl_ext.runs.records import read_run

pytestmark = pytest.mark.browser


@pytest.fixture
def browser(tmp_path):
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


SEEN = """({
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    drawn: Number(document.documentElement.dataset.drawn),
    ground: getComputedStyle(document.body).backgroundColor,
    plots: [...document.querySelectorAll('.plot')].map(plot => {
        const outer = plot.getBoundingClientRect(), svg = plot.querySelector('svg');
        const inner = svg.getBoundingClientRect();
        const texts = [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect());
        return {id: plot.id, outer: outer.width, inner: inner.width, left: outer.left, right: outer.right,
                ground: getComputedStyle(svg).backgroundColor,
                cut: texts.filter(t => t.width && (t.left < inner.left - 1 || t.right > inner.right + 1)).length,
                marks: svg.querySelectorAll('[role=graphics-symbol]').length};
    }),
})"""


def look(browser, page, width, dark, charts):
    """Open a page and check what holds of every one: nothing overflows, all is drawn, nothing is asked of a network."""
    browser.events.clear()
    browser.open(page, width, dark=dark)
    if folder := os.environ.get("VERL_EXT_SCREENSHOTS"):
        browser.screenshot(f"{folder}/{page.stem}-{width}-{'dark' if dark else 'light'}.png")
    seen = browser.evaluate(SEEN)
    assert seen["width"] == width
    assert seen["overflow"] == 0, "the page scrolls sideways"
    assert seen["drawn"] == len(seen["plots"]) == charts
    assert seen["ground"] == ("rgb(20, 21, 24)" if dark else "rgb(246, 246, 244)")
    for plot in seen["plots"]:
        assert plot["inner"] <= plot["outer"] + 1 and plot["left"] >= 0 and plot["right"] <= width, plot
        assert plot["inner"] > (250 if width == 400 else 500) and plot["marks"] > 0 and plot["cut"] == 0, plot
        assert plot["ground"] == ("rgb(30, 32, 36)" if dark else "rgb(255, 255, 255)")
    requests = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert requests and all(url.startswith(("file:", "data:", "blob:")) for url in requests), requests
    problems = [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"
                or e["method"] == "Log.entryAdded" and e["params"]["entry"]["level"] == "error"]  # fmt: skip
    assert not problems
    lefts = "[...document.querySelectorAll('.plot')].map(p => Math.round(p.getBoundingClientRect().left))"
    assert len(set(browser.evaluate(lefts))) == (2 if width > 820 else 1)


LOOKS = [(1400, False), (1400, True), (820, False), (400, True), (400, False)]


def test_a_comparison_as_people_see_it(root, browser, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_ext.compare.draw_all", lambda comparison, folder: [])  # not looked at here
    output = tmp_path / "report"
    build(find(root, []), output, "A comparison", "cpu/grpo", None)
    page = tmp_path / "comparison.html"
    shutil.copy(output / "index.html", page)  # alone, without the files beside it
    for width, dark in LOOKS:
        look(browser, page, width, dark, charts=7)

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

    lines = "document.querySelectorAll('#accuracy-rollouts .mark-line path').length"
    before = browser.evaluate(lines)
    assert before == 3 * 3 + 3  # each seed and each mean
    browser.evaluate("document.querySelector('.chips button[data-recipe=\"cpu/sara\"]').click()")
    browser.evaluate("new Promise(done => setTimeout(done, 500))")
    assert browser.evaluate(lines) == before - 4


def test_a_run_as_people_see_it(run_folder, browser, tmp_path):
    add_prompts(run_folder)
    page = tmp_path / "run.html"
    page.write_text(run_page(read_run(run_folder)))
    for width, dark in LOOKS:
        look(browser, page, width, dark, charts=7)


def test_a_chart_is_saved(root, browser, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_ext.compare.draw_all", lambda comparison, folder: [])
    build(find(root, []), tmp_path, "A comparison", "cpu/grpo", None)
    browser.open(tmp_path / "index.html", 1400)
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))
    for kind in ("png", "svg", "csv"):
        browser.evaluate(f"document.querySelector('[data-chart=fates][data-kind={kind}]').click()")
    saved = [tmp_path / "saved" / f"fates.{kind}" for kind in ("png", "svg", "csv")]
    browser.evaluate("new Promise(done => setTimeout(done, 1500))")
    png, svg, csv = (path.read_bytes() for path in saved)
    assert png.startswith(b"\x89PNG") and svg.startswith(b"<svg")
    head, *rows = csv.decode().splitlines()
    assert head == "name,recipe,rollouts,per cent,place" and len(rows) == 9
    assert "trained,cpu/dapo,2880,37.5,0" in rows
