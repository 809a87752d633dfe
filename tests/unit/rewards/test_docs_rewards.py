"""docs/rewards.md names every setting with its default, every reason, and nothing else."""

import re
from dataclasses import fields
from pathlib import Path

from verl_ext.rewards.math_verify import MathSettings

DOC = Path(__file__).parents[3] / "docs" / "rewards.md"


def rows(heading):
    table = DOC.read_text().split(heading)[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("| `")]


def test_settings():
    documented = {row[0].strip("`"): row[1].strip("`") for row in rows("| `reward_kwargs.` | default | meaning |")}
    defaults = {field.name: field.default for field in fields(MathSettings)}
    assert documented == {name: value if isinstance(value, str) else f"{value:g}" for name, value in defaults.items()}


def test_reasons():
    """Every reason that the code gives, found as the word it is written as."""
    root = DOC.parents[1] / "verl_ext"
    given = set()
    for path in (*root.glob("rewards/*.py"), root / "rollout/scoring.py", root / "rollout/outcomes.py"):
        text = path.read_text()
        given |= set(re.findall(r'_unscored\("(\w+)"', text))
        given |= set(re.findall(r'Unscored\(\s*"(\w+)"', text))
        given |= set(re.findall(r'"deadline" if .* else "(\w+)"', text))
        given |= set(re.findall(r'"unscored": "(\w+)"', text))
        given |= set(re.findall(r'UNSCORED: "(\w+)"', text))
        given |= set(re.findall(r'None, None, "(\w+)"', text))
    documented = {name for row in rows("| reason | |") for name in re.findall(r"`(\w+)`", row[0])}
    assert documented == given
