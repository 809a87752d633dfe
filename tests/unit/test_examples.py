# SPDX-License-Identifier: Apache-2.0
"""The examples run as their first lines say, and the core alone imports nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_core_alone_is_light():
    code = "import sys; sys.path.insert(0, 'examples'); import core_alone; core_alone.main()\n"
    code += "print('heavy:', sorted({'torch', 'verl', 'ray', 'vllm', 'transformers', 'omegaconf'} & set(sys.modules)))"
    done = run("-c", code)
    assert done.stdout.splitlines()[-1] == "heavy: []", done.stdout + done.stderr
