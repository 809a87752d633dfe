"""The tiny task: chain sums of single digits, and the sloppy adder whose habit reinforcement learning must break.

A prompt is a chain sum, `9+8+7+6=`, and the right answer is its total, `30`, followed by the end token: three new tokens
at most. The difficulty of a prompt is `total // 10`, the number of tens carried on the way (0 to 5).

The policy is pre-trained on answers written by a *sloppy adder*: someone who adds digit by digit and, each time the units
pass ten, forgets to carry that ten with probability 1/2. A policy that has learned this corpus perfectly answers a
prompt of difficulty d rightly with probability 2**-d: all but always at 0, one time in 32 at 5. So success rates run from
0 to 1 across prompts, as they do for a language model on real mathematics, and there is something to unlearn: RL rewards
the true total only, every ingredient of which the policy already has, and the habit of dropping tens has to go. (A policy
pre-trained on right answers leaves RL almost nothing to improve: it is right, or the sum is beyond it.)

Held-out prompts are chosen by a hash of the *sorted* digits, so that all orders of the same digits fall on the same side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from random import Random

from verl_ext.tiny.settings import DIFFICULTIES, PolicySettings

DATA_SOURCE = "chain_sums"

_DRAWS_LIMIT = 5_000_000  # about half a minute: far above what any feasible request needs


def prompt_text(digits: Sequence[int]) -> str:
    """`(9, 8, 7)` -> `"9+8+7="`."""
    return "+".join(str(d) for d in digits) + "="


def difficulty(digits: Sequence[int]) -> int:
    """Tens carried while adding: total // 10."""
    return sum(digits) // 10


@lru_cache(maxsize=1 << 17)
def _held_out_sorted(digits: tuple[int, ...], percent: int) -> bool:
    key = "chain_sums:" + "".join(str(d) for d in digits)
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 100 < percent


def is_held_out(digits: Sequence[int], percent: int) -> bool:
    """Whether this sum, in any order of its digits, is kept from pre-training and RL alike.

    Independent of every seed, so that all runs are measured on prompts that none of them has seen.

    Args:
        digits: the digits of the sum, in any order.
        percent: about this percentage of the digit multisets is held out.
    """
    return _held_out_sorted(tuple(sorted(digits)), percent)


def sloppy_total(digits: Sequence[int], forget_probability: float, rng: Random) -> int:
    """Add as the sloppy adder does: each carried ten is forgotten with `forget_probability`.

    The number of carries is total // 10 = d whatever the order, so the result is total - 10 B with
    B ~ Binomial(d, forget_probability).
    """
    tens, units = 0, 0
    for digit in digits:
        units += digit
        if units >= 10:
            units -= 10
            if rng.random() >= forget_probability:
                tens += 1
    return 10 * tens + units


def draw_digits(settings: PolicySettings, rng: Random) -> tuple[int, ...]:
    """One chain: its length uniform in min_digits..max_digits, its digits uniform in 0..9; totals of 60 and more are redrawn."""
    span = settings.max_digits - settings.min_digits + 1
    while True:
        length = settings.min_digits + int(rng.random() * span)
        digits = tuple(int(rng.random() * 10) for _ in range(length))
        if difficulty(digits) < DIFFICULTIES:
            return digits


def draw_pretraining_pair(settings: PolicySettings, rng: Random) -> tuple[str, str]:
    """A prompt that is not held out, its difficulty uniform in 0..5, and the sloppy adder's answer to it."""
    level = int(rng.random() * DIFFICULTIES)
    while True:
        digits = draw_digits(settings, rng)
        if difficulty(digits) == level and not is_held_out(digits, settings.held_out_percent):
            return prompt_text(digits), str(sloppy_total(digits, settings.forget_probability, rng))


def quotas(size: int, shares: Sequence[float]) -> list[int]:
    """`size` split in proportion to `shares` by largest remainders: adds up to `size`, each within 1 of its exact part."""
    exact = [size * share for share in shares]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    return counts


def draw_prompts(
    size: int, shares: Sequence[float], held_out: bool, settings: PolicySettings, seed: int
) -> list[tuple[int, ...]]:
    """Different chains in a given mix over difficulty, in random order.

    Args:
        size: how many.
        shares: share of each difficulty 0..5, adding up to 1.
        held_out: from the held-out side (validation) or from the other (training).
        settings: lengths and the held-out percentage.
        seed: the same seed gives the same list.

    Raises:
        ValueError: fewer than asked for exist (or turn up in five million draws) at some difficulty.
    """
    rng = Random(f"chain_sums prompts {seed} {'held_out' if held_out else 'train'}")
    wanted = quotas(size, shares)
    found: list[dict[tuple[int, ...], None]] = [{} for _ in wanted]
    missing, draws = size, 0
    while missing:
        draws += 1
        if draws > _DRAWS_LIMIT:
            short = {d: f"{len(f)} of {w}" for d, (f, w) in enumerate(zip(found, wanted, strict=True)) if len(f) < w}
            side = "val_size" if held_out else "train_size"
            raise ValueError(
                f"{side}={size} asks for more different prompts than were found in {_DRAWS_LIMIT} draws (by difficulty: "
                f"{short}); lower {side}, change the shares, or allow more digits"
            )
        digits = draw_digits(settings, rng)
        level = difficulty(digits)
        if len(found[level]) == wanted[level] or is_held_out(digits, settings.held_out_percent) != held_out:
            continue
        if digits not in found[level]:
            found[level][digits] = None
            missing -= 1
    prompts = [digits for level in found for digits in level]
    rng.shuffle(prompts)
    return prompts


def verl_row(digits: Sequence[int], index: int, split: str) -> dict:
    """One row of verl's RLHF data format."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": prompt_text(digits)}],
        "ability": "arithmetic",
        "reward_model": {"style": "rule", "ground_truth": str(sum(digits))},
        "extra_info": {"index": index, "difficulty": difficulty(digits), "digits": len(digits), "split": split},
    }
