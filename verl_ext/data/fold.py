"""Fold copies of a prompt into one. Memory grows with the number of different prompts, not of rows.

Two prompts are the same if their messages agree up to white space. A prompt whose copies give different answers, or
none, cannot be rewarded: it is dropped, with the reason.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from statistics import median_low

CONFLICT, EMPTY = "conflicting answers", "empty answer"


@dataclass(slots=True)
class Folded:
    """One prompt and its copies."""

    file: int
    """Which of the input files its first copy is in."""
    row: int
    """Row of its first copy there."""
    answer: str
    """Answer of the first copy, stripped; may be empty."""
    copies: int = 0
    """Rows that have this prompt."""
    answers: dict[str, int] | None = None
    """Rows by answer, where they differ."""

    @property
    def reason(self) -> str | None:
        """Why the prompt is dropped; None: it is kept."""
        if self.answers is not None:
            return CONFLICT
        return None if self.answer else EMPTY


class Fold:
    """The prompts seen so far, in order of their first copies."""

    def __init__(self) -> None:
        self.prompts: list[Folded] = []
        self._place: dict[bytes, int] = {}

    def add(self, identity: str, answer: str, copies: int, file: int, row: int) -> Folded:
        """Count `copies` rows of a prompt with one answer, the first of them at (`file`, `row`)."""
        digest = hashlib.blake2b(" ".join(identity.split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        place = self._place.setdefault(digest, len(self.prompts))
        answer = answer.strip()
        if place == len(self.prompts):
            self.prompts.append(Folded(file, row, answer))
        prompt = self.prompts[place]
        if answer != prompt.answer and prompt.answers is None:
            prompt.answers = {prompt.answer: prompt.copies}
        if prompt.answers is not None:
            prompt.answers[answer] = prompt.answers.get(answer, 0) + copies
        prompt.copies += copies
        return prompt


@dataclass(frozen=True)
class Counts:
    """What became of every row; `rows` is the sum of the three below it."""

    rows: int
    kept_rows: int
    conflicting_rows: int
    empty_rows: int
    prompts: int
    kept: int
    conflicting: int
    empty: int
    copies_least: int
    copies_median: int
    copies_most: int

    @classmethod
    def of(cls, fold: Fold, rows: int) -> Counts:
        """Counts of a finished fold over `rows` input rows.

        Raises:
            AssertionError: the rows do not add up.
        """
        parts: dict[str | None, list[int]] = {None: [], CONFLICT: [], EMPTY: []}
        for prompt in fold.prompts:
            parts[prompt.reason].append(prompt.copies)
        copies = sorted(prompt.copies for prompt in fold.prompts)
        if sum(copies) != rows:
            raise AssertionError(f"{rows} rows were read, but the prompts have {sum(copies)} copies in all")
        return cls(
            rows=rows,
            kept_rows=sum(parts[None]),
            conflicting_rows=sum(parts[CONFLICT]),
            empty_rows=sum(parts[EMPTY]),
            prompts=len(copies),
            kept=len(parts[None]),
            conflicting=len(parts[CONFLICT]),
            empty=len(parts[EMPTY]),
            copies_least=copies[0] if copies else 0,
            copies_median=median_low(copies) if copies else 0,
            copies_most=copies[-1] if copies else 0,
        )

    def describe(self) -> str:
        return (
            f"{self.rows:,} rows, {self.prompts:,} different prompts ({self.copies_least} to {self.copies_most} copies "
            f"of each, median {self.copies_median}): {self.kept:,} kept; dropped {self.conflicting:,} with conflicting "
            f"answers ({self.conflicting_rows:,} rows) and {self.empty:,} without an answer ({self.empty_rows:,} rows)"
        )
