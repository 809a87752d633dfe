# SPDX-License-Identifier: Apache-2.0
"""Links between the pages: every relative target exists, and so does every heading that is linked to."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    page
    for pattern in ("*.md", "docs/*.md", "recipes/*/*.md", "examples/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
    if not page.name.endswith("_text.md")  # becomes a part of a page in docs/
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{target} is linked to, and is not there"
        if anchor and path.suffix == ".md":
            assert anchor in headings(path), f"{target}#{anchor}: no such heading"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1300
