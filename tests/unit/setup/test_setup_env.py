"""scripts/setup_env.sh with a stand-in for Python that writes down what it is asked to do, and installs nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

STAND_IN = """#!/bin/sh
[ "${0##*/}" != uv ] || what="uv, $UV_FIND_LINKS, $UV_INDEX: "
echo "$what$*" >> "$ASKED"
case "$1 $2 $3 $*" in
    "-c "*) echo 3.11.7 ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "#!$PWD/$3/bin/python" > "$3/bin/pip" ;;
    "-m pip config"*) echo "global.index-url='https://one'"; echo "global.find-links='/wheels'" ;;
    "-m pip install"*" uv") [ -z "$UV" ] || cp "$0" "${0%/*}/uv" ;;
    "pip install"*) [ "$UV" = works ] ;;
esac
"""


INSTALLS = [
    "-c constraints/cpu.txt torch",
    "-c constraints/cpu.txt -e .[cpu,dev]",
    "--no-deps -r constraints/cpu-no-deps.txt",
]


@pytest.fixture
def setup(tmp_path):
    """Runs the script in a copy of the files that it reads; returns its output and what Python was asked for."""
    for name in ("scripts/setup_env.sh", "pyproject.toml", "constraints"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    python, asked = tmp_path / "stand_in", tmp_path / "asked"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*arguments, uv=""):
        asked.write_text("")
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "ASKED": str(asked), "UV": uv}
        done = subprocess.run([tmp_path / "scripts/setup_env.sh", *arguments], capture_output=True, text=True,
                              env=environment, timeout=60)  # fmt: skip
        return done, [line for line in asked.read_text().splitlines() if "pip " in line or "check_versions" in line]

    return run


def test_each_kind_of_machine_gets_its_own_environment_from_its_own_constraints(setup, tmp_path):
    done, asked = setup()
    assert done.returncode == 0, done.stderr
    assert [line.partition("-version-check ")[2] for line in asked[:4]] == ["-c constraints/cpu.txt -q uv", *INSTALLS]
    assert "check_versions('cpu')" in asked[-1]
    assert (tmp_path / ".venv").is_dir() and not (tmp_path / ".venv-gpu").exists()
    done, asked = setup("gpu")
    assert done.returncode == 0, done.stderr
    assert [line for line in asked if "install" in line][-1].endswith("-c constraints/gpu.txt -e .[gpu,dev]")
    assert "-m pip check" in asked and "check_versions('cuda')" in asked[-1]
    assert (tmp_path / ".venv-gpu").is_dir()


def test_uv_installs_with_the_settings_of_pip(setup):
    done, asked = setup(uv="works")
    assert done.returncode == 0, done.stderr
    installs = [line for line in asked if line.startswith("uv")]
    assert [line.partition("bin/python ")[2] for line in installs] == INSTALLS
    assert all(line.startswith("uv, /wheels, : pip install --python .venv/") for line in installs)
    assert [line for line in asked if "pip install" in line and line not in installs] == asked[:1]


def test_where_uv_fails_pip_installs(setup):
    done, asked = setup(uv="fails")
    assert done.returncode == 0, done.stderr
    tried = [line.partition("bin/python ")[2] for line in asked if line.startswith("uv")]
    did = [line.partition("-version-check ")[2] for line in asked[1:] if "-version-check" in line]
    assert tried == did == INSTALLS


def test_what_is_up_to_date_is_left_alone_until_its_constraints_change(setup, tmp_path):
    setup("gpu")
    assert setup("gpu")[1] == []
    with (tmp_path / "constraints/cpu.txt").open("a") as file:
        file.write("# another\n")
    assert setup("gpu")[1] == []
    with (tmp_path / "constraints/gpu.txt").open("a") as file:
        file.write("# another\n")
    assert setup("gpu")[1] != []


def test_another_kind_is_refused_by_name(setup):
    done, asked = setup("tpu")
    assert done.returncode == 2 and "tpu: accepted are cpu, gpu" in done.stderr and asked == []
