# SPDX-License-Identifier: Apache-2.0
"""`verl-ext COMMAND ...`: the commands of this package under one name. `python -m verl_ext.COMMAND` does the same."""

from __future__ import annotations

import runpy
import sys

from verl_ext import need_commands

COMMANDS = {
    "train": ("verl_ext.main_ppo", "train with a recipe: recipe=cpu/sara"),
    "check": ("verl_ext.check", "everything that can be known before a start, in the words of train"),
    "simulate": ("verl_ext.simulate", "rules on a simulated population of prompts"),
    "lab": ("verl_ext.lab", "rules around a small policy that really learns, in one process"),
    "compare": ("verl_ext.compare", "recipes and seeds side by side, in one report"),
    "report": ("verl_ext.report", "table and plot of one run's folder"),
    "demo": ("verl_ext.demo", "the whole stack on a tiny policy"),
    "smollm2": ("verl_ext.smollm2_demo", "the whole stack on a language model of 135 million parameters"),
}
DATA = ("dapo_math_17k", "validation_sets", "gsm8k", "countdown")
USAGE = "\n".join(
    (
        "verl-ext COMMAND ...    (COMMAND --help says more)",
        "",
        *(f"  {name:<10}{about}" for name, (_, about) in COMMANDS.items()),
        f"  {'data SET':<10}prepare a data set: {', '.join(DATA)}",
    )
)


def main() -> None:
    """Run the command that the first argument names."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "help"):
        print(USAGE)
        return
    need_commands()
    if name == "data":
        module = f"verl_ext.data.{rest.pop(0)}" if rest and rest[0] in DATA else None
        known, name = DATA, f"data {rest[0] if module is None and rest else ''}"
    else:
        module, known = COMMANDS.get(name, (None,))[0], (*COMMANDS, "data")
    if module is None:
        from verl_ext.command_line import nearest

        sys.exit(f"verl-ext: {name.strip()!r} is no command{nearest(name.rpartition(' ')[2], known)}")
    sys.argv = [f"verl-ext {name}", *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
