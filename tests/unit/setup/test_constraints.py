"""The constraints files agree with pyproject.toml and with verl's own pins, and name a version of everything once."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from verl_ext.checks.versions import REQUIRED, REQUIRED_ON_CPU, TRIED, TRIED_ON_CUDA

ROOT = Path(__file__).resolve().parents[3]
PYTHONS = ("3.10", "3.11", "3.12")


def table(text, name):
    """A list of pyproject.toml, without a parser, which Python 3.10 has not."""
    body = re.search(rf"^{name} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'^    "([^"]+)",', body[1], re.MULTILINE)


def pinned(kind, python):
    """Version of each package for a Python on Linux."""
    pins = {}
    for line in (ROOT / "constraints" / f"{kind}.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        environment = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux",
                       "platform_machine": "x86_64"}  # fmt: skip
        if requirement.marker and not requirement.marker.evaluate(environment):
            continue
        (specifier,) = requirement.specifier
        name = canonical(requirement.name)
        assert specifier.operator == "==" and requirement.url is None and name not in pins, line
        pins[name] = specifier.version
    return pins


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_need_has_one_version_that_it_accepts(kind, python):
    pins = pinned(kind, python)
    project = (ROOT / "pyproject.toml").read_text()
    needs = [Requirement(need) for part in ("dependencies", "train", kind, "dev")
             for need in table(project, part) if need != "verl_ext[train]"]  # fmt: skip
    needs += [need for need in map(Requirement, importlib.metadata.requires("verl"))
              if need.marker is None or kind == "gpu" and need.marker.evaluate({"extra": "vllm"})]  # fmt: skip
    assert len(needs) > 30
    for need in needs:
        seen = Version(pins[canonical(need.name)]).public
        assert need.specifier.contains(seen, prereleases=True), (str(need), seen)


@pytest.mark.parametrize("python", PYTHONS)
def test_versions_that_are_checked_before_a_run_are_those_that_are_installed(python):
    cpu, gpu = pinned("cpu", python), pinned("gpu", python)
    for name, version in {**REQUIRED, **TRIED}.items():
        assert f"{cpu[canonical(name)]}.".startswith(f"{version}.")
        assert f"{gpu[canonical(name)]}.".startswith(f"{version}.")
    assert gpu["vllm"] == TRIED_ON_CUDA["vllm"] and cpu["torch"] == REQUIRED_ON_CPU["torch"]


def test_no_file_of_constraints_names_a_place_to_fetch_from():
    for path in (ROOT / "constraints").glob("*.txt"):
        said = [line for line in path.read_text().splitlines() if "://" in line or line.startswith("-")]
        assert said == [], path
