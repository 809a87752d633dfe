# SPDX-License-Identifier: Apache-2.0
"""The examples run as their first lines say, and the core alone imports nothing heavy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.runs.run_folders import add_prompts

ROOT = Path(__file__).resolve().parents[2]


def run(*words):
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "said"), [("core_alone", "step 5: 124 rollouts"), ("rule_of_ones_own", "two_then_all keeps the contract")]
)
def test_an_example_runs(name, said):
    done = run(f"examples/{name}.py")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


CELLS = """
import ast, json, sys
names = {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        *body, last = ast.parse("".join(cell["source"])).body
        shown = isinstance(last, ast.Expr) and not ast.unparse(last).startswith("print(")
        exec(compile(ast.Module(body if shown else [*body, last], []), cell["id"], "exec"), names)
        value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names) if shown else None
        if value is not None:
            print("shown:", value._repr_svg_())
"""


def test_the_notebook_runs(run_folder):
    """Its cells one after the other, as a kernel does it; what a cell ends with is shown by its own SVG."""
    add_prompts(run_folder)
    folder = ROOT / "examples"
    done = subprocess.run(
        [sys.executable, "-c", CELLS, "runs_and_simulation.ipynb"], cwd=folder, capture_output=True, text=True,
        timeout=120, env={**os.environ, "VERL_EXT_RUN": str(run_folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The ledger adds up" in done.stdout and "50 of 60 prompts sampled" in done.stdout
    assert done.stdout.count("shown: <svg") == 3 and ">trained<" in done.stdout and ">dynamic_sampling<" in done.stdout
    notebook = json.loads((folder / "runs_and_simulation.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "outputs are not kept"


def test_the_core_alone_is_light():
    code = "import sys; sys.path.insert(0, 'examples'); import core_alone; core_alone.main()\n"
    code += "print('heavy:', sorted({'torch', 'verl', 'ray', 'vllm', 'transformers', 'omegaconf'} & set(sys.modules)))"
    done = run("-c", code)
    assert done.stdout.splitlines()[-1] == "heavy: []", done.stdout + done.stderr
