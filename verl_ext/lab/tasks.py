"""The tasks of the laboratory: prompts, answers, rewards, and the sloppy corpora of their base policies.

Two families. `sums` are the chain sums of `verl_ext.tiny`. `digits` are six digits (`long`: 31) whose first m are to be
rewritten by a skill, say each d as 9 - d: the prompt `b4905123=` asks for four of them. The corpus slips: a digit
is copied unchanged with a probability that goes with the skill, so that success falls with m, and what is learned about
one skill's habit helps with that skill only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from random import Random

import numpy as np

from verl_ext.lab.decoder import DecoderSettings
from verl_ext.tiny.chain_sums import difficulty, draw_pretraining_pair, draw_prompts, prompt_text
from verl_ext.tiny.task_settings import MIXES, PolicySettings
from verl_ext.tiny.tokens import END_ID

Tokens = tuple[int, ...]

_SHORT, _LONG = 6, 31
_MAPS: tuple[Callable[[list[int]], list[int]], ...] = (
    lambda d: [9 - x for x in d],
    lambda d: [(x + 1) % 10 for x in d],
    lambda d: [(x + 3) % 10 for x in d],
    lambda d: [(2 * x + 1) % 10 for x in d],
    lambda d: d[1:] + d[:1],
    lambda d: [(7 * x + 5) % 10 for x in d],
)
_SLIPS = (0.1, 0.25, 0.4, 0.5, 0.65, 0.8)
"""By skill, the probability that the corpus copies a digit unchanged."""
_LONG_COUNTS, _LONG_SLIPS = (7, 12, 17, 22, 27, 31), (0.02, 0.05, 0.08, 0.12, 0.15, 0.2)
"""By difficulty, digits asked for and the probability of a slip."""


@dataclass(frozen=True)
class Family:
    """Tasks that share their base policies."""

    name: str
    """Part of the cache's key."""
    sizes: DecoderSettings
    """The policy."""
    pairs: Callable[[int], Iterator[tuple[str, str]]]
    """Of a seed: prompts and answers of the corpus, without end."""
    steps: int
    """Optimizer steps of pre-training."""
    batch: int = 256
    """Pairs a step."""
    lr: float = 2e-3
    """Peak learning rate: 30 steps of warm-up, then linear to 0."""


@dataclass(frozen=True)
class Task:
    """What a run trains on and is measured by."""

    name: str
    """As in `TASKS`."""
    family: Family
    """Which policies it is for."""
    prompts: list[Tokens]
    """Token ids of the training prompts."""
    answers: list[Tokens | None]
    """The right answer, without the end token; None: there is none, the prompt is hopeless."""
    levels: np.ndarray
    """(prompts,), difficulty or skill."""
    held_out: list[tuple[Tokens, Tokens]]
    """Prompts and right answers that no training sees; none is hopeless."""
    held_out_levels: np.ndarray
    """(held-out prompts,), likewise."""
    max_tokens: int
    """Most tokens of an answer, with the end token."""
    graded: bool = False
    """Whether wrong answers have a reward, too."""

    def score(self, row: int, answer: Tokens | None) -> tuple[bool, float]:
        """Right or wrong, and the reward.

        Graded: 1 - |answer - total| / 30, not below 0, for a number; 0 for anything else.

        Args:
            answer: without the end token; None where it did not end.
        """
        right = self.answers[row]
        correct = answer is not None and answer == right
        if not self.graded or correct or right is None or answer is None:
            return correct, float(correct)
        text = bytes(t for t in answer if t < 256)
        if len(text) != len(answer) or not text.isdigit():
            return False, 0.0
        return False, max(0.0, 1 - abs(int(text) - int(bytes(right))) / 30)


def _held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < 51  # a fifth


def _digits_pair(level: int, digits: list[int], long: bool, rng: Random | None) -> tuple[str, str]:
    """Prompt and answer at a level; with ``rng`` as the corpus has it, else right."""
    if long:
        count, slip, skill = _LONG_COUNTS[level], _LONG_SLIPS[level], 0
        head = "abcdef"[level]
    else:
        skill, count = level
        slip, head = _SLIPS[skill], f"{'abcdef'[skill]}{count}"
    right = _MAPS[skill](digits)[:count]
    if rng is not None:
        right = [d if rng.random() < slip else r for d, r in zip(digits, right, strict=False)]
    return f"{head}{''.join(map(str, digits))}=", "".join(map(str, right))


def _draw_digits(long: bool, rng: Random, held_out: bool) -> tuple[tuple[int, int] | int, list[int]]:
    while True:
        level = rng.randrange(6) if long else (rng.randrange(6), rng.randrange(2, _SHORT + 1))
        digits = [rng.randrange(10) for _ in range(_LONG if long else _SHORT)]
        if _held_out("".join(map(str, digits))) == held_out:
            return level, digits


def _sums_pairs(seed: int) -> Iterator[tuple[str, str]]:
    settings, rng = PolicySettings(), Random(f"lab sums {seed}")
    while True:
        yield draw_pretraining_pair(settings, rng)


def _digits_pairs(long: bool, seed: int) -> Iterator[tuple[str, str]]:
    rng = Random(f"lab digits {long} {seed}")
    while True:
        level, digits = _draw_digits(long, rng, False)
        yield _digits_pair(level, digits, long, rng)


_SIZES = DecoderSettings(hidden_size=64, intermediate_size=256)

FAMILIES = {
    "sums": Family("sums", _SIZES, _sums_pairs, steps=1500, batch=128, lr=4e-3),
    "digits": Family("digits", _SIZES, partial(_digits_pairs, False), steps=1200, batch=128, lr=4e-3),
    "long": Family("long", _SIZES, partial(_digits_pairs, True),
                   steps=500, batch=32),
}  # fmt: skip

TASKS = ("balanced", "sparse", "impossible", "skills", "long", "graded")


@lru_cache(maxsize=8)
def make_task(name: str, train_size: int = 1024, held_out_size: int = 256, hopeless: float | None = None) -> Task:
    """A task's prompts; always the same ones.

    Args:
        hopeless: share of the training prompts without a right answer, drawn over all of them; None: .2 for
            ``impossible``, else 0.
    """
    share = (0.2 if name == "impossible" else 0.0) if hopeless is None else hopeless
    make = _sums if name in ("balanced", "sparse", "impossible", "graded") else _digits
    family, train, held_out, max_tokens = make(name, train_size, held_out_size)
    answers: list[Tokens | None] = [tuple(answer.encode()) for _, answer, _ in train]
    for row in np.random.default_rng(99).permutation(len(answers))[: round(share * len(answers))]:
        answers[row] = None
    return Task(
        name, FAMILIES[family], [tuple(prompt.encode()) for prompt, _, _ in train], answers,
        np.array([level for *_, level in train]),
        [(tuple(prompt.encode()), tuple(answer.encode())) for prompt, answer, _ in held_out],
        np.array([level for *_, level in held_out]), max_tokens, graded=name == "graded",
    )  # fmt: skip


def _sums(name: str, train_size: int, held_out_size: int):
    shares = MIXES["sparse" if name == "sparse" else "balanced"]
    parts = [
        [
            (prompt_text(d), str(sum(d)), difficulty(d))
            for d in draw_prompts(size, shares, held_out, PolicySettings(), 0)
        ]
        for size, held_out in ((train_size, False), (held_out_size, True))
    ]
    return "sums", *parts, 3


def _digits(name: str, train_size: int, held_out_size: int):
    long = name == "long"
    parts = []
    for size, held_out in ((train_size, False), (held_out_size, True)):
        rng = Random(f"lab {name} prompts {held_out}")
        rows: dict[str, tuple[str, str, int]] = {}
        while len(rows) < size:
            level, digits = _draw_digits(long, rng, held_out)
            prompt, answer = _digits_pair(level, digits, long, None)
            rows[prompt] = (prompt, answer, level if long else level[0])
        parts.append(list(rows.values()))
    return ("long", *parts, _LONG + 1) if long else ("digits", *parts, _SHORT + 1)


def with_end(answer: Tokens) -> Tokens:
    """An answer and its end token."""
    return (*answer, END_ID)
