"""The task: sums of two numbers of one or two digits, behind four worked examples.

The prompt is plain text that goes on with the answer's line, which is how a language model of 135 million parameters
adds best: it is right on some sums nearly always, on many hardly ever, and now and then on the rest.
"""

from __future__ import annotations

import hashlib
from itertools import product
from random import Random
from typing import Any

from verl_ext.data.rows import verl_row

DATA_SOURCE = "smollm2_sums"
Sum = tuple[int, int]

EXAMPLES: tuple[Sum, ...] = ((3, 4), (12, 7), (8, 9), (25, 16))
"""The worked ones. They are neither trained nor validated on."""
SHARES = (1 / 32, 15 / 32, 1 / 2)
"""Share of the sums with no, one and two numbers of two digits."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template: the messages' text and nothing else."""


def prompt_text(terms: Sum) -> str:
    """The four examples, each on a line with its answer, and the sum up to its equals sign."""
    worked = "".join(f"{a} + {b} = {a + b}\n" for a, b in EXAMPLES)
    return f"{worked}{terms[0]} + {terms[1]} ="


def answer_text(total: int | str) -> str:
    """The right answer, written as in the examples."""
    return f" {total}\n"


def is_held_out(terms: Sum) -> bool:
    """Whether this sum, in either order, is kept from training: a fifth of them are, whatever the seed."""
    return hashlib.sha256(f"{DATA_SOURCE}:{min(terms)}+{max(terms)}".encode()).digest()[0] < 51


def draw_sums(size: int, held_out: bool, seed: int = 0) -> list[Sum]:
    """Different sums in the shares of `SHARES`, in random order.

    Raises:
        ValueError: there are fewer of a kind.
    """
    kinds: tuple[list[Sum], ...] = ([], [], [])
    for terms in product(range(1, 100), repeat=2):
        if terms not in EXAMPLES and is_held_out(terms) == held_out:
            kinds[sum(term > 9 for term in terms)].append(terms)
    rng = Random(f"{DATA_SOURCE} {held_out} {seed}")
    counts = [round(size * share) for share in SHARES[:2]]
    chosen: list[Sum] = []
    for number, (pairs, wanted) in enumerate(zip(kinds, [*counts, size - sum(counts)], strict=True)):
        if wanted > len(pairs):
            raise ValueError(f"size={size} asks for {wanted} sums with {number} numbers of two digits; there are "
                             f"{len(pairs)}: accepted is a smaller size")  # fmt: skip
        chosen += rng.sample(pairs, wanted)
    rng.shuffle(chosen)
    return chosen


def rows(size: int, held_out: bool, seed: int = 0) -> list[dict[str, Any]]:
    """The sums as verl's rows."""
    return [
        verl_row(DATA_SOURCE, [{"role": "user", "content": prompt_text(terms)}], str(sum(terms)),
                 ability="arithmetic", index=str(index))
        for index, terms in enumerate(draw_sums(size, held_out, seed))
    ]  # fmt: skip
