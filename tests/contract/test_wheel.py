# SPDX-License-Identifier: Apache-2.0
"""The package as a person installs it: a wheel, beside verl, used from a folder that is not the repository."""

import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, cwd, **env):
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources, so that the repository stays as it is. Needs no package index."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("verl_ext", "configs", "recipes", "scripts"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    built = run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source),
        cwd=source,
    )
    assert built.returncode == 0, built.stderr
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of an environment that sees this one's packages, and verl_ext from the wheel alone."""
    folder = tmp_path_factory.mktemp("env") / "venv"
    made = run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    assert made.returncode == 0, made.stderr
    python = folder / "bin" / "python"
    purelib = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd="/").stdout.strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(purelib)
    # Without the .pth of an editable install: those work only in a folder that Python itself treats as a site folder.
    (purelib / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def test_configs_and_entry_points_are_inside(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"verl_ext/configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.yaml")}
    recipes = {
        f"verl_ext/configs/recipe/{path.relative_to(ROOT / 'recipes')}" for path in (ROOT / "recipes").rglob("*.yaml")
    }
    assert "verl_ext/configs/main.yaml" in configs and "verl_ext/launch/verl_ext.sbatch" in files
    assert recipes and recipes <= files
    assert configs <= files
    policy = {str(path.relative_to(ROOT)) for path in (ROOT / "verl_ext/tiny/policy_seed0").iterdir()}
    assert "verl_ext/tiny/policy_seed0/model.safetensors" in policy <= files
    assert not [name for name in files if name.split("/")[0] not in ("verl_ext", "verl_ext-0.1.0.dist-info")]
    entry_points = zipfile.ZipFile(wheel).read("verl_ext-0.1.0.dist-info/entry_points.txt").decode()
    assert "[verl.plugins]" in entry_points and "[vllm.general_plugins]" in entry_points
    assert "verl_ext-0.1.0.dist-info/licenses/LICENSE" in files


def test_the_wheel_is_what_is_imported(installed, tmp_path):
    seen = run(installed, "-c", "import verl_ext, verl_ext.allocation; print(verl_ext.__file__)", cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    assert Path(seen.stdout.strip()).is_relative_to(installed.parents[1])


@pytest.mark.parametrize("recipe", ["cpu/sara", "cpu/grpo"])
def test_a_recipe_is_composed_from_another_folder(installed, tmp_path, recipe):
    done = run(installed, "-m", "verl_ext.main_ppo", f"recipe={recipe}", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    import yaml

    config = yaml.safe_load(done.stdout)
    assert config["allocation"]["allocator"]["name"] == {"cpu/sara": "sara", "cpu/grpo": "uniform"}[recipe]
    assert config["trainer"]["device"] == "cpu"
    # A key of verl's own: its configuration was found too.
    assert "clip_ratio" in config["actor_rollout_ref"]["actor"]
    assert list(tmp_path.iterdir()) == [], "printing the configuration must leave nothing behind"


def test_the_core_needs_numpy_and_scipy_alone(wheel):
    needs = zipfile.ZipFile(wheel).read("verl_ext-0.1.0.dist-info/METADATA").decode()
    base = re.findall(r"^Requires-Dist: ([^;\n]+)$", needs, re.MULTILINE)
    assert [need.split(">")[0] for need in base] == ["numpy", "scipy"]
    assert {"train", "cpu", "gpu"} <= set(re.findall(r"^Provides-Extra: (\S+)$", needs, re.MULTILINE))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_core_alone_in_an_environment_of_its_own(wheel, tmp_path):
    """From an empty folder, with what `pip install verl_ext` brings; needs a package index."""
    made = run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    python, empty = tmp_path / "venv" / "bin" / "python", tmp_path / "empty"
    empty.mkdir()
    done = run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, cwd=empty)
    assert done.returncode == 0, done.stderr
    packages = run(python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check", cwd=empty).stdout
    assert {line.split("==")[0] for line in packages.split()} == {"numpy", "scipy", "verl_ext", "pip", "setuptools"}
    example = (ROOT / "examples" / "core_alone.py").read_text()
    done = run(python, "-c", example, cwd=empty)
    assert done.returncode == 0 and done.stdout, done.stderr
    script = python.with_name("verl-ext")
    assert "train" in run(script, "--help", cwd=empty).stdout
    for command in ((python, "-m", "verl_ext.main_ppo"), (script, "train")):
        refused = run(*command, "recipe=cpu/sara", cwd=empty)
        assert refused.returncode == 1 and refused.stderr.count("\n") == 1, refused.stderr
        assert "hydra not found" in refused.stderr and "verl_ext[train]" in refused.stderr
    assert list(empty.iterdir()) == []
