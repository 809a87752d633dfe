# SPDX-License-Identifier: Apache-2.0
"""docs/adding_a_rule.md, tried: its package is installed outside the repository, and its commands are run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).parent / "outside_rule"
DOCUMENT = (ROOT / "docs" / "adding_a_rule.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for language, block in re.findall(r"```(sh|console)\n(.*?)```", DOCUMENT, re.S)
    for line in block.splitlines()
    if language == "sh" or line.startswith("$ ")
]
TRAINS = [shlex.split(line) for line in COMMANDS if "verl_ext.main_ppo" in line]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "best-of-probes"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    """Runs a command with the package installed, in a folder that is neither the repository nor the package's."""
    target, cwd = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("cwd")

    def run(*command, cwd=cwd):
        return subprocess.run(
            [sys.executable if part == "python" else str(part) for part in command],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(target)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    install = shlex.split(COMMANDS[0])
    done = run("python", "-m", *install[:-1], "-q", "--no-index", "--target", target, source)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source / "best_of_probes")  # what runs is what was installed
    return run


def test_the_document_shows_the_files_as_they_are():
    shown = dict(re.findall(r"^`([^`\n]+)`:\n\n```\w+\n(.*?)```$", DOCUMENT, re.S | re.M))
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.*") if path.suffix != ".pyc"}
    assert files.pop("best_of_probes/configs/__init__.py") == ""
    assert shown == files
    assert len(files["best_of_probes/__init__.py"].splitlines()) < 60


def test_the_commands_of_the_document_are_those_tried_here():
    assert COMMANDS[0] == "pip install --no-deps --no-build-isolation ."
    assert COMMANDS[1] == "python -m pytest test_best_of_probes.py"
    assert [command[:3] for command in TRAINS] == [["python", "-m", "verl_ext.main_ppo"]] * (len(COMMANDS) - 2)
    assert len(TRAINS) == 5


def test_its_own_test_passes(run, source):
    done = run(*shlex.split(COMMANDS[1]), "-q", "-p", "no:cacheprovider", cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("command", TRAINS[:4], ids=lambda command: " ".join(command[3:]))
def test_its_yaml_is_found_and_composed(run, command):
    done = run(*command, *([] if "--cfg" in command else ["--cfg", "job"]), "--resolve")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    given = dict(part.split("=") for part in command if part.startswith("allocation.allocator."))
    assert config["allocation"]["allocator"] == {
        "name": "best_of_probes",
        "group_size": config["actor_rollout_ref"]["rollout"]["n"],
        "probe": int(given.get("allocation.allocator.probe", 4)),
        "probes": 2.0,
    }
    assert config["trainer"]["device"] == "cpu" and "clip_ratio" in config["actor_rollout_ref"]["actor"]


def test_a_wrong_value_is_refused_in_the_words_of_the_document(run):
    done = run(*TRAINS[4])
    message = DOCUMENT.split(shlex.join(TRAINS[4]))[1].splitlines()[1]
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1] == message


CHECK = """
import sys
from hydra import compose, initialize_config_module
import verl_ext.main_ppo
from verl_ext.checks.allocation_settings import check_config

with initialize_config_module("verl_ext.configs", version_base=None):
    for overrides in {overrides}:
        settings, budget = check_config(compose("main", overrides=overrides))
        print(type(settings.rules.allocator).__module__, budget.group_size)
"""


def test_the_checks_before_a_run_accept_it(run):
    """Also without its YAML, by name."""
    by_name = ["recipe=cpu/sara", "allocation/allocator=uniform", "allocation.allocator.name=best_of_probes",
               "+allocation.allocator.probe=3"]  # fmt: skip
    assert all(part.lstrip("+") in DOCUMENT for part in by_name[1:])
    overrides = [[part for part in command[3:] if "=" in part] for command in TRAINS[:4]] + [by_name]
    done = run("python", "-c", CHECK.format(overrides=overrides))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"best_of_probes {n}" for n in (8, 8, 16, 8, 8)]


def test_a_folder_of_yaml_files_needs_no_package(run, tmp_path):
    """``--config-dir``, for files that belong to no package."""
    folder = tmp_path / "allocation" / "allocator"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("name: best_of_probes\ngroup_size: 8\nprobe: 2\nprobes: 3.0\n")
    command = [*TRAINS[0][:3], "--config-dir", tmp_path, "recipe=cpu/sara", "allocation/allocator=mine", "--cfg", "job"]
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["allocation"]["allocator"]["probes"] == 3.0
