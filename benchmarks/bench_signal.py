"""What a group's gradient is worth, by its size and share of right answers: the measurement behind `marginal_signal`.

At a base policy of the laboratory's chain sums, groups of many prompts are drawn. Of each mixed group the gradient G of
its rows (GRPO's advantages, summed) is computed, and the gradient H of the exact held-out success rate once. Both are
taken in Adam's metric: coordinates are scaled by P, one over the root mean square of the groups' gradients. Written, by
size k and share p of right answers:

- worth: mean of <P G, H> / c in units of its mean over all groups, with its standard error (c: `allocation/signal.py`);
- noise: mean of <G, P G> / k, in units of its mean over all groups.

    python -m benchmarks.bench_signal
    python -m benchmarks.bench_signal --tasks skills --policies 1 --prompts 160 --output signal_skills.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from verl_ext.allocation import Group, Request, reward_statistics  # noqa: E402
from verl_ext.allocation.signal import group_value  # noqa: E402
from verl_ext.files import write_whole  # noqa: E402
from verl_ext.lab.engine import Engine  # noqa: E402
from verl_ext.lab.policies import answer_log_probs, base_policy  # noqa: E402
from verl_ext.lab.tasks import make_task  # noqa: E402
from verl_ext.lab.update import Row, UpdateSettings, advantages, loss  # noqa: E402

OUTPUT = Path(__file__).parent / "results" / "signal.json"
_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def flat(gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One vector of a gradient's parts."""
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def measure(name: str, seed: int, prompts: int) -> list[tuple[int, int, float, float]]:
    """k, s, <P G, H> and <G, P G> of every mixed group, both in units of their means over all."""
    task, settings = make_task(name), UpdateSettings(loss_agg_mode="seq-mean-token-sum")
    policy = base_policy(task, seed)
    parameters = list(policy.parameters())
    held_out = torch.zeros(sum(p.numel() for p in parameters))
    for start in range(0, len(task.held_out), 64):
        part = task.held_out[start : start + 64]
        log_probs, owners = answer_log_probs(policy, part)
        success = torch.zeros(len(part)).index_add(0, owners, log_probs).exp().sum() / len(task.held_out)
        held_out += flat(torch.autograd.grad(success, parameters))
    engine = Engine(policy, task.prompts, task.score, task.max_tokens, seed)
    found, gradients = [], []
    for k in (4, 8, 16):
        for row in np.random.default_rng(0).permutation(len(task.prompts))[:prompts].tolist():
            group = Group(f"k{k}p{row}", row, 1)
            request = Request(group, k)
            group.requested = k
            outcomes = engine.generate([request])
            s = sum(outcome.correct for outcome in outcomes)
            if not 0 < s < k:
                continue
            scores = [outcome.score for outcome in outcomes]
            advantage = advantages(scores, reward_statistics(scores), settings)
            rows = [Row(group.uid, engine.trajectories[group.uid, i], float(a)) for i, a in enumerate(advantage)]
            objective = -k * loss(policy, task.prompts, rows, settings, task.max_tokens)
            gradients.append(flat(torch.autograd.grad(objective, parameters)))
            found.append((k, s))
    matrix = torch.stack(gradients)
    scale = 1 / (matrix.pow(2).mean(0).sqrt() + 1e-8)
    worth, noise = ((matrix * scale) @ held_out).numpy(), ((matrix * matrix) @ scale).numpy()
    sizes = np.array(found, float)
    c = group_value(sizes[:, 1], sizes[:, 0], 0.0, 0.0)
    worth, noise = worth / c, noise / sizes[:, 0]
    return [(k, s, float(w), float(n)) for (k, s), w, n in
            zip(found, worth / worth.mean(), noise / noise.mean(), strict=True)]  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["balanced", "sparse"])
    parser.add_argument("--policies", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--prompts", type=int, default=256, help="prompts of each task and size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    groups = []
    for name in options.tasks:
        for seed in options.policies:
            groups += measure(name, seed, options.prompts)
    table = []
    data = np.array(groups)
    share = data[:, 1] / data[:, 0]
    for k in (4, 8, 16):
        for low, high in zip(_EDGES, _EDGES[1:], strict=False):
            of = (data[:, 0] == k) & (share > low) & (share <= high)
            if of.sum() < 5:
                continue
            worth, noise = data[of, 2], data[of, 3]
            row = {"k": k, "share": [low, high], "groups": int(of.sum()), "worth": worth.mean(), "noise": noise.mean(),
                   "worth_error": worth.std(ddof=1) / of.sum() ** 0.5}  # fmt: skip
            table.append({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()})
            print(f"k {k:>2}, share ({low}, {high}]: {int(of.sum()):>4} groups, worth {row['worth']:+.2f} "
                  f"+- {row['worth_error']:.2f}, noise {row['noise']:.2f}")  # fmt: skip
    result = {"tasks": options.tasks, "policies": options.policies, "prompts": options.prompts, "table": table}
    write_whole(options.output, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
