"""What was measured on one machine, carried to 1,024 GPUs and a million prompts: the tables of docs/scaling.md.

    python -m benchmarks.projection [--engine benchmarks/results/fake_engine.json] [--write]

Reads `scaling.json` (make: `python -m benchmarks.bench_scaling`) and `fake_engine.json` (`python -m
benchmarks.bench_engine`), and measures what those leave out: the hash of a prompt and saving the state of a million
prompts. Projections are products and quotients of these figures, nothing more: `load` is CPU seconds a second, so a
single process breaks at 1. With ``--write`` the tables between the marks of docs/scaling.md are replaced.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOC = ROOT / "docs" / "scaling.md"
START, END = "<!-- benchmarks.projection -->", "<!-- end -->"
GPUS, PROMPTS = 1024, 1_000_000
RATES = {"8,000 tokens": 0.25, "2,000 tokens": 1.0, "500 tokens": 4.0}
"""Rollouts a second of a GPU by mean length, at an assumed 2,000 tokens a second and GPU (a 7B policy)."""
SELECTORS = ("shuffled", "greso", "mopps", "cero", "dps")
SINGLE = ("driver", "controller")
"""Of which there is one, whatever the cluster's size."""


def own_measurements() -> dict[str, float]:
    """CPU seconds: hashing prompts of a thousand characters, and saving and loading the state of a million prompts."""
    from benchmarks.bench_selectors import begin, outcomes, settings, tell
    from verl_ext.allocation import PromptPool, make_selector, prompt_key
    from verl_ext.allocation.state import load_state, save_state

    prompts = [[{"role": "user", "content": f"{i} " * 200}] for i in range(20_000)]
    start = time.process_time()
    for i, prompt in enumerate(prompts):
        prompt_key("math", prompt, str(i))
    found = {"key_us": (time.process_time() - start) / len(prompts) * 1e6}
    pool, selector = PromptPool([f"{i:032x}" for i in range(PROMPTS)]), make_selector("dps", **settings("dps"))
    begin(selector, pool, 0)
    tell(selector, outcomes(np.random.default_rng(0), list(range(PROMPTS))), issue=False)
    selector.end_step()
    state = {"pool": pool.state_dict(), "selector": selector.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        save_state(Path(folder) / "state", state)
        found["save_s"] = time.process_time() - start
        found["state_bytes"] = float(sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file()))
        start = time.process_time()
        load_state(Path(folder) / "state")
        found["load_s"] = time.process_time() - start
    return found


def tables(scaling: dict[str, Any], engine: dict[str, Any], own: dict[str, float]) -> str:
    """Markdown; "measured" and "projected" stand in the heads."""
    run = engine["runs"]["8192 a step"]
    us = {part: run["us_a_rollout"][f"{part}_cpu"] for part in ("driver", "controller", "storage", "worker")}
    lines = ["| process | there are | measured: CPU a rollout | " + " | ".join(
        f"projected load, {GPUS} GPUs, {name} ({rate * GPUS:,.0f} rollouts/s)" for name, rate in RATES.items()) + " |",
        "|---|---|---|" + "---|" * len(RATES)]  # fmt: skip
    names = {
        "driver": "driver: collector, ledger, rules", "controller": "TransferQueue's controller",
        "storage": "TransferQueue's storage units", "worker": "rollout workers",
    }  # fmt: skip
    for part, name in names.items():
        loads = [rate * GPUS * us[part] / 1e6 for rate in RATES.values()]
        shown = [f"{load:.2f}" if part in SINGLE else f"{load:.2f} in all" for load in loads]
        many = "one" if part in SINGLE else "any number"
        lines.append(f"| {name} | {many} | {us[part]:,.0f} us | {' | '.join(shown)} |")
    size = str(PROMPTS)
    lines += ["", "| selector | measured: CPU seconds a step of 128 groups, 1,000,000 prompts | measured: bytes a "
              "prompt | projected: its memory |", "|---|---|---|---|"]  # fmt: skip
    for name in SELECTORS:
        held = scaling["bytes_a_prompt"][name][size]
        step = scaling["time"][f"{name}, step of 128 groups"]["seconds"][size]
        lines.append(f"| `{name}` | {step:.4f} | {held:.0f} | {held * PROMPTS / 1e6:,.0f} MB |")
    pool = {part: scaling["bytes_a_prompt"][f"pool: {part}"][size] for part in ("keys", "pool", "order")}
    total = pool["keys"] + pool["pool"] + 2 * pool["order"]
    lines += ["", "| what else a prompt costs | measured | projected, 1,000,000 prompts |", "|---|---|---|",
              f"| pool: key, state, two epochs' order | {total:.0f} bytes | {total * PROMPTS / 1e6:,.0f} MB |",
              f"| hashing it at the start | {own['key_us']:.1f} us | {own['key_us'] * PROMPTS / 1e6:,.0f} s |",
              "| saved state (compressed), each prompt seen once by `dps` "
              f"| {own['state_bytes'] / PROMPTS:.0f} bytes | "
              f"{own['state_bytes'] / 1e6:,.0f} MB; measured: saved in {own['save_s']:.1f} s, "
              f"loaded in {own['load_s']:.1f} s |"]  # fmt: skip
    workers = f"{run['processes']['worker']} worker(s), {engine['machine']['cores']} cores"
    found = f"CPU a rollout: {run['rollouts']:,.0f} rollouts in {run['steps']} steps, {workers}."
    return "\n".join([*lines, "", found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, default=RESULTS / "fake_engine.json")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    arguments = parser.parse_args()
    scaling = json.loads((RESULTS / "scaling.json").read_text())
    text = tables(scaling, json.loads(arguments.engine.read_text()), own_measurements())
    print(text)
    if arguments.write:
        before, _, rest = DOC.read_text().partition(START)
        DOC.write_text(f"{before}{START}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
