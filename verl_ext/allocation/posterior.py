"""Beta posteriors of a prompt's success rate: the probability that a group ends mixed, and expected variance.

Model: the success rate of a prompt is Beta(alpha, beta) before any rollout; after s successes in n scored rollouts it
is Beta(alpha + s, beta + n - s) (SARA, arXiv 2607.26253; the closed forms for a general prior are derived here).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from scipy.special import betaln, gammaln

# Up to this many factors the product is summed term by term, which keeps the relative accuracy of small results.
_MOST_TERMS = 512


def effective_probability(
    successes: Any, trials: Any, group_size: Any, alpha: Any = 1.0, beta: Any = 1.0
) -> np.ndarray | float:
    """Probability that a group of ``group_size`` ends mixed, given ``successes`` in the first ``trials`` rollouts.

    1 where the prefix is mixed; on a pure prefix of n >= 1

        all failed:   1 - B(alpha, beta + k) / B(alpha, beta + n) = 1 - prod_{j=n}^{k-1} (beta + j) / (alpha + beta + j)
        all passed:   1 - B(alpha + k, beta) / B(alpha + n, beta)

    and for n = 0 the mean of the two at n = 1 under the prior. For the uniform prior this is (k - n) / (k + 1), and
    (k - 1) / (k + 1) at n = 0. All arguments broadcast.

    Returns:
        float64, a Python float if every argument is a scalar.

    Raises:
        ValueError: counts that are no whole numbers with 0 <= successes <= trials <= group_size and group_size >= 1,
            or a prior parameter that is not finite and positive.
    """
    scalar = all(np.ndim(value) == 0 for value in (successes, trials, group_size, alpha, beta))
    s, n, k = (
        _whole(name, v) for name, v in (("successes", successes), ("trials", trials), ("group_size", group_size))
    )
    a, b = _positive("alpha", alpha), _positive("beta", beta)
    s, n, k, a, b = np.broadcast_arrays(s, n, k, a, b)
    wrong = (s < 0) | (s > n) | (n > k) | (k < 1)
    if wrong.any():
        i = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise ValueError(
            f"successes={s[i]}, trials={n[i]}, group_size={k[i]}; "
            "accepted: 0 <= successes <= trials <= group_size and group_size >= 1"
        )
    result = np.ones(s.shape)
    uniform = (a == 1) & (b == 1)
    empty, failed, passed = n == 0, (s == 0) & (n > 0), (s == n) & (n > 0)
    plain = uniform & (failed | passed)
    result[plain] = (k[plain] - n[plain]) / (k[plain] + 1)
    plain = uniform & empty
    result[plain] = (k[plain] - 1) / (k[plain] + 1)
    for pure, first, second in ((failed, a, b), (passed, b, a)):
        at = pure & ~uniform
        result[at] = _pure(first[at], second[at], n[at], k[at])
    at = empty & ~uniform
    if at.any():
        a, b, k = a[at], b[at], k[at]
        one = np.ones_like(k)
        result[at] = (a * _pure(b, a, one, k) + b * _pure(a, b, one, k)) / (a + b)
    return float(result) if scalar else result


def expected_variance(alpha: Any, beta: Any) -> np.ndarray | float:
    """E[p (1 - p)] = alpha beta / ((alpha + beta)(alpha + beta + 1)) for p ~ Beta(alpha, beta); broadcasts.

    Raises:
        ValueError: a parameter that is not finite and positive.
    """
    a, b = _positive("alpha", alpha), _positive("beta", beta)
    total = a + b
    result = (a / total) * (b / (total + 1))
    return float(result) if np.ndim(result) == 0 else result


def spread_probability(
    counts: Any, group_size: Any, levels: Any, tolerance: float = 0.0, concentration: Any = 1.0
) -> np.ndarray | float:
    """Probability that the scores of a group of ``group_size`` end up spread over more than ``tolerance``.

    The counterpart of :func:`effective_probability` for graded scores: a score takes one of C levels v_1 < ... < v_C,
    with probabilities that are Dirichlet(concentration) before any rollout and Dirichlet(concentration + counts) after
    (derived here). A group is not spread if its scores lie in one window W_i = {v_j: v_i <= v_j <= v_i + tolerance}.
    By the lowest level i that occurs, with m = k - n rollouts to come and a = concentration + counts,

        p = 1 - sum_i [ P(all m in W_i) - (P(all m in W_i without v_i) if counts_i = 0) ]
        P(all m in W) = prod_{j < m} (a_W + j) / (a + j),   a_W and a the sums over W and over all levels,

    over the i at or below the lowest level seen whose window reaches the highest seen. 1 where the scores are spread
    already. Two levels and tolerance 0 give :func:`effective_probability`.

    Args:
        counts: (..., C), scored rollouts by level.
        group_size: k, broadcast against the leading axes.
        levels: (C,), rising.
        tolerance: a spread (highest - lowest) no larger than this is none, up to 1e-9.
        concentration: prior pseudo-counts, (C,) or one number for each level.

    Returns:
        float64 of the leading shape; a Python float for a single group.

    Raises:
        ValueError: counts that are no whole numbers of 0 or more or exceed ``group_size``; levels that do not rise;
            a negative tolerance; or pseudo-counts that are not finite and positive.
    """
    counts, size = _whole("counts", counts), _whole("group_size", group_size)
    levels = np.asarray(levels, np.float64)
    if levels.ndim != 1 or counts.ndim < 1 or counts.shape[-1] != len(levels) or not (np.diff(levels) > 0).all():
        raise ValueError(f"levels={levels.tolist()}, counts of shape {counts.shape}; accepted: rising, (..., levels)")
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance}; accepted: a number of 0 or more")
    n = counts.sum(axis=-1)
    n, size = np.broadcast_arrays(n, size)
    if (counts < 0).any() or (n > size).any() or (size < 1).any():
        raise ValueError(f"counts of up to {n.max()} rollouts; accepted: 0 or more, in all at most group_size >= 1")
    counts = np.broadcast_to(counts, (*n.shape, len(levels)))
    after = counts + _positive("concentration", concentration)
    total, more = after.sum(axis=-1), size - n
    width = float(tolerance) + 1e-9
    seen = counts > 0
    lowest = np.where(seen.any(axis=-1), seen.argmax(axis=-1), len(levels))
    highest = np.where(seen.any(axis=-1), len(levels) - 1 - seen[..., ::-1].argmax(axis=-1), -1)
    same = np.zeros(n.shape)
    for i in range(len(levels)):
        last = int(np.searchsorted(levels, levels[i] + width, side="right")) - 1
        within = _all_in(after[..., i : last + 1].sum(axis=-1), total, more)
        without = np.where(seen[..., i], 0.0, _all_in(after[..., i + 1 : last + 1].sum(axis=-1), total, more))
        same += np.where((i <= lowest) & (highest <= last), within - without, 0.0)
    spread = levels[highest] - levels[np.minimum(lowest, len(levels) - 1)] > width
    result = np.where(spread, 1.0, np.clip(1.0 - same, 0.0, 1.0))
    return float(result) if result.ndim == 0 else result


def _all_in(part: np.ndarray, total: np.ndarray, more: np.ndarray) -> np.ndarray:
    """prod_{j < more} (part + j) / (total + j); 1 for an empty product, 0 for a part of nothing."""
    some = np.maximum(part, 1e-300)
    log = gammaln(some + more) - gammaln(some) - gammaln(total + more) + gammaln(total)
    return np.where(more == 0, 1.0, np.where(part > 0, np.exp(log), 0.0))


def abandonment_point(group_size: int, tau: float | Fraction, alpha: float = 1.0, beta: float = 1.0) -> tuple[int, int]:
    """Length n* >= 1 of the pure prefix at which the effective probability first falls below ``tau``.

    n* = min{n >= 1: p_eff(n) < tau}, strictly; the probability falls to 0 at n = k, so n* <= k. For the uniform prior
    the comparison (k - n) < tau (k + 1) is exact, with ``tau`` taken as the nearest fraction of denominator up to 10^6,
    so that 5/9 is the grid value it is meant to be; otherwise differences within 1e-12 are ties.

    Returns:
        n* after failures only, and after successes only; the same for a symmetric prior.

    Raises:
        ValueError: ``tau`` is outside (0, 1), or what :func:`effective_probability` refuses.
    """
    if not 0 < tau < 1:
        raise ValueError(f"tau={tau}; accepted: a number in (0, 1)")
    n = np.arange(1, group_size + 1)
    if alpha == 1 and beta == 1:
        exact = Fraction(tau).limit_denominator(10**6)
        below = np.array(
            [(group_size - i) * exact.denominator < exact.numerator * (group_size + 1) for i in n.tolist()]
        )
        point = int(n[below.argmax()])
        return point, point
    points = []
    for successes in (np.zeros_like(n), n):
        below = np.asarray(effective_probability(successes, n, group_size, alpha, beta)) < float(tau) - 1e-12
        points.append(int(n[below.argmax()]) if below.any() else int(group_size))
    return points[0], points[1]


def _pure(a: np.ndarray, b: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """1 - prod_{j=n}^{k-1} (b + j) / (a + b + j): after n failures (swap a and b for successes)."""
    if not n.size:
        return np.zeros(n.shape)
    first, last = int(n.min()), int(k.max())
    if last - first > _MOST_TERMS:
        return -np.expm1(betaln(a, b + k) - betaln(a, b + n))
    log = np.zeros(n.shape)
    for j in range(first, last):
        log += np.where((n <= j) & (j < k), np.log1p(-a / (a + b + j)), 0.0)
    return -np.expm1(log)


def _whole(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False)
    whole = np.asarray(array, np.float64)
    if not (np.isfinite(whole) & (whole == np.rint(whole))).all():
        raise ValueError(f"{name}={value!r}; accepted: whole numbers")
    return whole.astype(np.int64)


def _positive(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value, np.float64)
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"{name}={value!r}; accepted: finite numbers above 0")
    return array
