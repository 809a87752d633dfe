"""The tiny task: chain sums of single digits, and the sloppy adder whose habit reinforcement learning must break.

A prompt is a chain sum, `9+8+7+6=`, and the right answer is its total, `30`, followed by the end token: three new
tokens at most. The difficulty of a prompt is `total // 10`, the number of tens carried on the way (0 to 5).

The policy is pre-trained on answers written by a *sloppy adder*: someone who adds digit by digit and, each time the
units reach ten, forgets to carry that ten with probability 1/2. A policy that has learned this corpus perfectly answers
a prompt of difficulty d rightly with probability 2**-d: always at 0, one time in 32 at 5. So success rates run from 0
to 1 across prompts, as they do for a language model on real mathematics, and there is something to unlearn. RL rewards
the true total only. The policy already produces it now and then; the habit of dropping tens is what has to go. (A
policy pre-trained on right answers leaves RL almost nothing to improve: it is right, or the sum is beyond it.)

Held-out prompts are chosen by a hash of the *sorted* digits, so that all orders of the same digits fall on one side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from random import Random

from verl_ext.tiny.task_settings import DIFFICULTIES, PolicySettings

DATA_SOURCE = "chain_sums"

_DRAWS_FOR_EACH = 1000  # draws for each prompt wanted, before they are said to be too few


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


@lru_cache(maxsize=1 << 12)
def _chains(length: int, total: int) -> int:
    """Number of chains of that many digits 0..9 with that total."""
    if length == 0:
        return int(total == 0)
    return sum(_chains(length - 1, total - digit) for digit in range(min(9, total) + 1))


def _pick(rng: Random, weights: Sequence[int]) -> int:
    """An index, drawn in proportion to the weights."""
    mark = int(rng.random() * sum(weights))
    for index, weight in enumerate(weights):
        mark -= weight
        if mark < 0:
            return index
    raise ValueError(f"weights must not all be 0, got {weights}")


@lru_cache(maxsize=64)
def _lengths(level: int, shortest: int, longest: int) -> tuple[int, ...]:
    lengths = tuple(n for n in range(shortest, longest + 1) if 9 * n >= 10 * level)
    if not lengths:
        raise ValueError(f"max_digits={longest} is too few for totals of difficulty {level} ({10 * level} and more)")
    return lengths


@lru_cache(maxsize=64)
def _totals(level: int, length: int) -> tuple[int, ...]:
    return tuple(_chains(length, 10 * level + units) for units in range(10))


@lru_cache(maxsize=1 << 12)
def _first_digits(length: int, total: int) -> tuple[int, ...]:
    return tuple(_chains(length - 1, total - digit) for digit in range(min(9, total) + 1))


def draw_digits(level: int, settings: PolicySettings, rng: Random) -> tuple[int, ...]:
    """One chain of a difficulty: length uniform among those possible, then uniform among all such chains.

    Raises:
        ValueError: no chain of at most `max_digits` digits is that difficult.
    """
    lengths = _lengths(level, settings.min_digits, settings.max_digits)
    length = lengths[int(rng.random() * len(lengths))]
    left = 10 * level + _pick(rng, _totals(level, length))
    digits = []
    for remaining in range(length, 0, -1):
        digit = _pick(rng, _first_digits(remaining, left))
        digits.append(digit)
        left -= digit
    return tuple(digits)


def draw_pretraining_pair(settings: PolicySettings, rng: Random) -> tuple[str, str]:
    """A prompt that is not held out, its difficulty uniform in 0..5, and the sloppy adder's answer to it."""
    while True:
        digits = draw_digits(int(rng.random() * DIFFICULTIES), settings, rng)
        if not is_held_out(digits, settings.held_out_percent):
            return prompt_text(digits), str(sloppy_total(digits, settings.forget_probability, rng))


def quotas(size: int, shares: Sequence[float]) -> list[int]:
    """`size` split in proportion to `shares` by largest remainders: adds up to it, each within 1 of its exact part."""
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
        ValueError: too few different chains of some difficulty exist, or turn up within a thousand draws for each one
            that is wanted.
    """
    rng = Random(f"chain_sums prompts {seed} {'held_out' if held_out else 'train'}")
    prompts: list[tuple[int, ...]] = []
    for level, wanted in enumerate(quotas(size, shares)):
        found: dict[tuple[int, ...], None] = {}
        for _ in range(_DRAWS_FOR_EACH * wanted):
            if len(found) == wanted:
                break
            digits = draw_digits(level, settings, rng)
            if is_held_out(digits, settings.held_out_percent) == held_out:
                found[digits] = None
        if len(found) < wanted:
            name = "val_size" if held_out else "train_size"
            raise ValueError(
                f"{name}={size} asks for {wanted} different prompts of difficulty {level}, but only {len(found)} were "
                f"found: lower {name}, change the shares or raise max_digits"
            )
        prompts.extend(found)
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
