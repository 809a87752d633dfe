"""Make the tiny policy and its data, or find them in the package and the cache.

    python -m verl_ext.tiny.prepare [--out DIR] [--mix balanced|sparse] [--seed 0] [--measure]

Prints where the policy and the two parquet files lie; with --measure, what the policy does on them. The policy of seed
0 comes with the package; `--policy DIR` pre-trains it anew and writes it to DIR, as it was made for the package.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from verl_ext.tiny.policy_store import TinyPaths, default_cache, prepare, write_policy
from verl_ext.tiny.task_settings import MIXES, PolicySettings, TinySettings


def _print_measured(paths: TinyPaths) -> None:
    import pyarrow.parquet as pq
    from transformers import AutoModelForCausalLM

    from verl_ext.tiny.measure import measure

    model = AutoModelForCausalLM.from_pretrained(paths.model).eval()
    for name, path in (("train", paths.train), ("held-out", paths.val)):
        rows = pq.read_table(path).to_pylist()
        prompts = [row["prompt"][0]["content"] for row in rows]
        answers = [row["reward_model"]["ground_truth"] for row in rows]
        print(f"{name}: {measure(model, prompts, answers)}")
        by_difficulty: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            by_difficulty.setdefault(row["extra_info"]["difficulty"], []).append(i)
        for level, members in sorted(by_difficulty.items()):
            found = measure(model, [prompts[i] for i in members], [answers[i] for i in members])
            print(f"  difficulty {level}: {found}")


def main(argv: list[str] | None = None) -> None:
    """Command line of the preparation."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.tiny.prepare", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=None, help="folder to write to (default: the cache)")
    parser.add_argument("--mix", choices=sorted(MIXES), default="balanced", help="difficulties of the RL prompts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the policy and of the choice of prompts")
    parser.add_argument("--train-size", type=int, default=TinySettings.train_size, help="different training prompts")
    parser.add_argument("--val-size", type=int, default=TinySettings.val_size, help="different held-out prompts")
    parser.add_argument("--policy", type=Path, default=None, help="pre-train the policy anew, into this new folder")
    parser.add_argument("--measure", action="store_true", help="then print the policy's success rates")
    args = parser.parse_args(argv)
    try:
        settings = TinySettings(
            mix=args.mix,
            seed=args.seed,
            train_size=args.train_size,
            val_size=args.val_size,
            policy=PolicySettings(seed=args.seed),
        )
        paths = prepare(default_cache() if args.out is None else args.out, settings)
        if args.policy is not None:
            args.policy.mkdir(parents=True)
            write_policy(args.policy, settings.policy)
            paths = dataclasses.replace(paths, model=args.policy)
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
    print(f"model {paths.model}\ntrain {paths.train}\nval   {paths.val}")
    if args.measure:
        _print_measured(paths)


if __name__ == "__main__":
    main()
