# SPDX-License-Identifier: Apache-2.0
"""The Dockerfiles, linted: no builder is needed for it. What they copy is what the package is built of."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KNOWN = {"FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}


def instructions(kind):
    text = re.sub(r"^#.*\n", "", (ROOT / "docker" / f"{kind}.Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    return [tuple(line.split(maxsplit=1)) for line in lines]


@pytest.fixture(params=["cpu", "gpu"])
def found(request):
    return request.param, instructions(request.param)


def test_instructions_are_known_and_the_base_has_a_version(found):
    _, steps = found
    assert {name for name, _ in steps} <= KNOWN and steps[0][0] == "FROM"
    (base,) = [value for name, value in steps if name == "FROM"]
    assert re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+-[\w.-]+", base), base


def test_all_that_the_package_is_built_of_is_copied(found):
    _, steps = found
    copied = {source for name, value in steps if name == "COPY" for source in shlex.split(value)[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    links = {path for path in (ROOT / "verl_ext").rglob("*") if path.is_symlink()}
    assert links
    reached = {os.path.relpath(path.resolve(), ROOT) for path in links}
    assert all(any(path == source or path.startswith(f"{source}/") for source in copied) for path in reached), reached
    named = re.findall(r'"(LICENSE|README.md)"', (ROOT / "pyproject.toml").read_text())
    needed = {"verl_ext", "pyproject.toml", *named}
    assert needed <= copied
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not copied & set(ignored)


def test_layers_keep_no_caches_and_pins_are_used(found):
    kind, steps = found
    runs = [value for name, value in steps if name == "RUN"]
    for run in runs:
        if "apt-get" in run:
            parts = ("apt-get update", "--no-install-recommends", "rm -rf /var/lib/apt/lists")
            assert all(part in run for part in parts)
        for install in re.findall(r"pip install [^&;]*", run):
            assert "--no-cache-dir" in install
            (pins,) = re.findall(r"(?:-c|-r) (constraints/\S+)", install)
            assert (ROOT / pins).is_file() and kind in pins
    assert any(f'".[{kind}]"' in run for run in runs)


def test_it_runs_the_command_as_no_superuser(found):
    _, steps = found
    last = dict(steps)
    assert last["USER"] == "runner" and json.loads(last["ENTRYPOINT"]) == ["verl-ext"]
    assert json.loads(last["CMD"]) == ["--help"]
    assert not any(re.search(r"(?i)(token|secret|password|key)=", value) for _, value in steps)
