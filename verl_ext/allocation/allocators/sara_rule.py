"""SARA's verdicts as a table: one look-up a group."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from ..posterior import abandonment_point, effective_probability
from ..settings import SettingError, require

CONTINUE, COMMIT, ABANDON = 0, 1, 2


@dataclass(frozen=True, eq=False)
class SaraRule:
    """Verdicts for every prefix of a group of ``group_size``.

    A prefix is (successes s, scored trials n, returned r): rollouts lost or unscored make n < r, and the group can
    still reach m = n + k - r trials. Mixed prefixes commit. A pure one is abandoned where p_eff(s, n, m) < tau or
    nothing remains; tau is not applied at n = 0, which is abandoned only where m < 2 cannot become mixed.
    """

    group_size: int
    after_failures: int
    """n* of a prefix of failures, when no rollout is lost."""
    after_successes: int
    """n* of a prefix of successes."""
    _codes: np.ndarray  # [kind: failed, passed, mixed; n; r]
    _more: np.ndarray  # [kind: failed, passed; n; r]: rollouts to ask so that a pure prefix is decided

    @property
    def longest(self) -> int:
        """The longest probe, when no rollout is lost."""
        return max(self.after_failures, self.after_successes)

    def verdicts(self, successes: Any, trials: Any, returned: Any = None) -> np.ndarray:
        """int8 codes CONTINUE 0, COMMIT 1, ABANDON 2, of the arguments' shape.

        Raises:
            ValueError: not 0 <= successes <= trials <= returned <= group_size everywhere.
        """
        s, n = np.asarray(successes), np.asarray(trials)
        r = n if returned is None else np.asarray(returned)
        for name, array in (("successes", s), ("trials", n), ("returned", r)):
            if array.dtype.kind not in "iu":
                raise ValueError(f"{name} are {array.dtype}; accepted: integers")
        if s.size and (s.min() < 0 or (s > n).any() or r.max() > self.group_size or (r is not n and (n > r).any())):
            raise ValueError(f"accepted: 0 <= successes <= trials <= returned <= group_size={self.group_size}")
        width = self.group_size + 1
        kind = (s != 0).astype(np.intp)
        kind += (s != n) & (s != 0)
        kind *= width
        kind += n
        kind *= width
        kind += r
        return self._codes.take(kind)

    def more(self, successes: int, trials: int, returned: int) -> int:
        """Rollouts after which an undecided prefix is decided, if all are scored and stay pure."""
        failed, passed = self._more[:, trials, returned]
        if trials == 0:
            return int(min(failed, passed))
        return int(failed if successes == 0 else passed)

    def commit_probability(self, alpha: float, beta: float) -> float:
        """P(a prompt is mixed within its probe) under the prior, before any rollout."""
        mixed_after_failure = effective_probability(0, 1, self.after_failures, alpha, beta)
        mixed_after_success = effective_probability(1, 1, self.after_successes, alpha, beta)
        return float((beta * mixed_after_failure + alpha * mixed_after_success) / (alpha + beta))


@lru_cache(maxsize=64)
def sara_rule(
    group_size: int, probe: int | None = 4, tau_low: float | None = None, alpha: float = 1.0, beta: float = 1.0
) -> SaraRule:
    """The rule of ``probe`` (n*) or of ``tau_low``; of both only if they agree.

    Raises:
        SettingError: neither is given, they disagree, one is out of range, or tau would abandon every prompt after
            its first rollout (the range that does not is named).
    """
    if probe is None and tau_low is None:
        raise SettingError("allocator.probe", None, f"an integer in [2, {group_size}], or allocator.tau_low instead")
    if probe is not None:
        require(2 <= probe <= group_size, "allocator.probe", probe, f"an integer in [2, group_size={group_size}]")
    points = (probe, probe)
    if tau_low is not None:
        require(0 < tau_low < 1, "allocator.tau_low", tau_low, "null, or a number in (0, 1)")
        points = abandonment_point(group_size, tau_low, alpha, beta)
        if min(points) < 2:
            most = min(effective_probability(s, 1, group_size, alpha, beta) for s in (0, 1))
            raise SettingError(
                "allocator.tau_low", tau_low,
                f"a number in (0, {most:.6g}]: above that, group_size={group_size}, alpha={alpha}, beta={beta} abandon "
                "prompts after one rollout",
            )  # fmt: skip
        if probe is not None and points != (probe, probe):
            raise SettingError(
                "allocator.tau_low", tau_low,
                f"null beside probe={probe}, or one that agrees with it: this one means a probe of {points[0]} after "
                f"failures and {points[1]} after successes; set allocation.allocator.probe=null to use it",
            )  # fmt: skip
    return _tabulate(group_size, points, tau_low, alpha, beta)


def sara_verdicts(
    successes: Any,
    trials: Any,
    group_size: int,
    probe: int | None = None,
    tau: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    returned: Any = None,
) -> np.ndarray:
    """Verdicts of many groups at once: int8 codes CONTINUE 0, COMMIT 1, ABANDON 2.

    Args:
        successes, trials: integer arrays of one shape; scored outcomes.
        returned: rollouts back, unscored and failed ones included; default ``trials``.
        probe, tau: as ``probe`` and ``tau_low`` of the allocator; neither means a probe of 4.

    Raises:
        SettingError, ValueError: as :func:`sara_rule` and :meth:`SaraRule.verdicts`.
    """
    if probe is None and tau is None:
        probe = 4
    return sara_rule(group_size, probe, tau, alpha, beta).verdicts(successes, trials, returned)


def _tabulate(size: int, points: tuple[int, int], tau: float | None, alpha: float, beta: float) -> SaraRule:
    n, r = np.meshgrid(np.arange(size + 1), np.arange(size + 1), indexing="ij")
    remaining = size - r
    possible = n <= r
    codes = np.full((3, size + 1, size + 1), CONTINUE, np.int8)
    codes[2] = COMMIT
    for kind, point in enumerate(points):
        below = _below(kind, point, size, n, remaining, tau, alpha, beta)
        codes[kind][possible & (n > 0) & (below | (remaining == 0))] = ABANDON
        codes[kind][possible & (n == 0) & (remaining < 2)] = ABANDON
    more = np.zeros((2, size + 1, size + 1), np.int64)
    for kind in (0, 1):
        for i in range(size + 1):
            for j in range(i, size):
                steps = np.arange(1, size - j + 1)
                more[kind, i, j] = steps[(codes[kind, i + steps, j + steps] == ABANDON).argmax()]
    return SaraRule(size, points[0], points[1], codes, more)


def _below(
    kind: int, point: int, size: int, n: np.ndarray, remaining: np.ndarray, tau: float | None, alpha: float, beta: float
) -> np.ndarray:
    """Where the effective probability of a pure prefix is below tau.

    A probe stands for the tau halfway between the values at n* - 1 and n*, so that no rounding can move it.
    """
    reachable = n + remaining
    if alpha == 1 and beta == 1:
        exact = Fraction(2 * (size - point) + 1, 2 * (size + 1))
        if tau is not None:
            exact = Fraction(tau).limit_denominator(10**6)
        return remaining * exact.denominator < exact.numerator * (reachable + 1)
    trials = np.maximum(n, 1)
    final = np.maximum(reachable, trials)
    p_eff = effective_probability(np.where(kind == 0, 0, trials), trials, final, alpha, beta)
    if tau is not None:
        return p_eff < tau - 1e-12
    before, at = (effective_probability(0 if kind == 0 else i, i, size, alpha, beta) for i in (point - 1, point))
    return p_eff < (before + at) / 2
