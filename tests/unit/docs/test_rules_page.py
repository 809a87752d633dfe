"""docs/rules.md says what the code says: every rule, every setting's default, every hook and its signature."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import yaml

from verl_ext.allocation import Allocator, AllocatorSettings, DownSampler, Selector, StepContext
from verl_ext.allocation.registry import allocators, downsamplers, selectors

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "rules.md").read_text()
KINDS = {"selector": selectors, "allocator": allocators, "down-sampler": downsamplers}
BASES = {"selector": Selector, "allocator": Allocator, "down-sampler": DownSampler}


def table(heading):
    """Rows of the first table below a heading, as dicts by column."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert all(len(row) == len(cells[0]) for row in cells)
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def ours(registry):
    return {name for name in registry.names() if registry.get(name).__module__.startswith("verl_ext.")}


def test_every_rule_has_one_row():
    rows = table("All rules")
    listed = {kind: [row["rule"].strip("`") for row in rows if row["kind"] == kind] for kind in KINDS}
    assert sum(map(len, listed.values())) == len(rows)
    for kind, registry in KINDS.items():
        assert sorted(listed[kind]) == sorted(ours(registry)), kind


@pytest.mark.parametrize("row", table("All rules"), ids=lambda row: row["rule"])
def test_settings_and_papers_are_those_of_the_code(row):
    kind, name = KINDS[row["kind"]], row["rule"].strip("`")
    fields = {field.name: field.default for field in dataclasses.fields(kind.settings_type(name))}
    for setting in re.findall(r"`([^`]+)`", row["main settings and defaults"]):
        ((key, value),) = yaml.safe_load(setting).items()
        assert key in fields and fields[key] == value, f"{name}: {setting}, in the code {fields.get(key)!r}"
    for paper in re.findall(r"\d{4}\.\d{5}", row["paper"]):
        source = Path(inspect.getfile(kind.get(name))).read_text()
        assert paper in source, f"{paper} is not named in the file of {name}"
    for setting in re.findall(r"`(\w+)(?:: [^`]*)?`", row["when not to use it"]):
        known = set(fields) | {"keep"} | set().union(*map(ours, KINDS.values())) | set(fields.values())
        known |= {field.name for field in dataclasses.fields(AllocatorSettings)}
        assert setting in known, f"{name}: {setting} is no setting of it, and no rule"
    assert row["decides"]


def hooks(base):
    """Public methods and properties of a base class, as the document writes them, and whether they must be given."""
    found = {}
    for name, member in vars(base).items():
        if name.startswith("_") or name in ("Settings", "METRICS"):
            continue
        if isinstance(member, property):
            found[name] = False
            continue
        signature = str(inspect.signature(member)).replace("'", "").replace("(self, ", "(").replace("(self)", "()")
        found[name + signature] = "NotImplementedError" in inspect.getsource(member)
    return found


@pytest.mark.parametrize("kind", BASES)
def test_every_hook_is_listed_with_its_signature(kind):
    rows = table(f"Hooks of {'an' if kind == 'allocator' else 'a'} {kind}")
    listed = {row["hook"].strip("`"): row["default"] == "required" for row in rows}
    assert listed == hooks(BASES[kind])
    assert all(row["purpose"] and row["default"] for row in rows)


def test_the_context_is_described_whole():
    names = set(re.findall(r"`(\w+)(?:\([^)]*\))?`", TEXT.split("`ctx` is a `StepContext`:")[1].split("\n\n")[0]))
    public = {name for name in vars(StepContext) if not name.startswith("_")}
    source = inspect.getsource(StepContext.__init__)
    assigned = set(re.findall(r"^        self\.(?!_)(\w+)(?:: [^=]+)? =", source, re.M))
    for_the_loop = {"issue", "record", "issued", "tokens_before"}
    assert names == (public | assigned) - for_the_loop


@pytest.mark.parametrize("document", ["rules.md", "adding_a_rule.md"])
def test_links_lead_somewhere(document):
    text = (ROOT / "docs" / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (ROOT / "docs" / target).exists(), target
    for module in re.findall(r"`verl_ext\.([\w.]+)`", text):
        if module.split(".")[0] in ("allocation", "testing"):
            holder, _, name = module.rpartition(".")
            imported = __import__(f"verl_ext.{holder or name}", fromlist=[name])
            assert not holder or hasattr(imported, name), module
