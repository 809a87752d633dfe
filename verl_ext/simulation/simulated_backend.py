"""A backend without a model: prompts with latent success rates, for tests and for comparing rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_ext.allocation.groups import Outcome, Request


class SimulatedBackend:
    """Outcomes as a pure function of seed, prompt row, the group's step and session, so that runs replay.

    Args:
        success_rates: by row of the pool; NaN: that prompt can never be scored. May be replaced between steps
            (``backend.success_rates = ...``) to let the policy learn.
        seed: of all outcomes.
        mean_tokens: mean length of a right answer; lengths are log-normal.
        wrong_factor: mean length of a wrong answer over that of a right one.
        sigma: standard deviation of the log length.
        max_tokens: the length limit; a response that reaches it is truncated.
        prompt_tokens: length of every prompt.
        unscorable: share of sessions whose answer cannot be scored.
        failing: share of sessions without a trajectory.
        refusing: share of prompts none of whose sessions has one.
        shaping: the score is ``correct - shaping x length / max_tokens``.

    Raises:
        ValueError: a success rate outside [0, 1], or shares that are no shares.
    """

    def __init__(
        self,
        success_rates: Sequence[float] | np.ndarray,
        seed: int = 0,
        *,
        mean_tokens: float = 400.0,
        wrong_factor: float = 1.0,
        sigma: float = 0.6,
        max_tokens: int = 4096,
        prompt_tokens: int = 100,
        unscorable: float = 0.0,
        failing: float = 0.0,
        refusing: float = 0.0,
        shaping: float = 0.0,
    ) -> None:
        rates = np.asarray(success_rates, np.float64)
        if rates.ndim != 1 or (rates < 0).any() or (rates > 1).any():
            raise ValueError("success_rates; accepted: one number in [0, 1], or NaN, a prompt")
        shares = {"unscorable": unscorable, "failing": failing, "refusing": refusing}
        if not all(0 <= share <= 1 for share in shares.values()):
            raise ValueError(f"{shares}; accepted: shares in [0, 1]")
        self.success_rates = rates
        self.policy_version = 0
        """Version recorded in the outcomes."""
        self.rollouts = 0
        """Rollouts generated so far."""
        self._seed = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
        self._log_mean = np.log(mean_tokens) - sigma * sigma / 2
        self._log_wrong = np.log(wrong_factor)
        self._sigma = sigma
        self._max_tokens = max_tokens
        self._prompt_tokens = prompt_tokens
        self._unscorable, self._failing, self._shaping = unscorable, failing, shaping
        rows = np.arange(len(rates))
        self.refused = self._uniform(rows, 0 * rows, 0 * rows, 4) < refusing
        """By row: prompts none of whose rollouts comes back."""

    def generate(self, requests: Sequence[Request]) -> list[Outcome]:
        """One outcome for every session, in the order of the requests."""
        counts = np.array([request.n for request in requests])
        row = np.repeat([request.group.prompt for request in requests], counts)
        offered_at = np.repeat([request.group.offered_at for request in requests], counts)
        first = np.repeat([request.first for request in requests], counts)
        session = first + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        uids = [uid for request in requests for uid in [request.group.uid] * request.n]
        rate = self.success_rates[row]
        correct = self._uniform(row, offered_at, session, 0) < rate
        lost = self._uniform(row, offered_at, session, 1)
        failed = (lost < self._failing) | self.refused[row]
        unscored = np.isnan(rate) | (lost >= 1 - self._unscorable)
        u, v = self._uniform(row, offered_at, session, 2), self._uniform(row, offered_at, session, 3)
        normal = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
        length = np.exp(self._log_mean + self._log_wrong * ~correct + self._sigma * normal)
        length = np.clip(length, 1, self._max_tokens).astype(np.int64)
        score = correct - self._shaping * length / self._max_tokens
        self.rollouts += len(row)
        outcomes = []
        for uid, number, right, points, tokens, is_failed, is_unscored in zip(
            uids, session.tolist(), correct.tolist(), score.tolist(), length.tolist(), failed.tolist(),
            unscored.tolist(), strict=True,
        ):  # fmt: skip
            if is_failed:
                outcome = Outcome(
                    uid, number, None, None, self._prompt_tokens, 0, True, False, self.policy_version,
                    error="the engine refuses it",
                )  # fmt: skip
            else:
                if is_unscored:
                    right = points = None
                cut = tokens >= self._max_tokens
                outcome = Outcome(
                    uid, number, right, points, self._prompt_tokens, tokens, False, cut, self.policy_version
                )
            outcomes.append(outcome)
        return outcomes

    def _uniform(self, row: np.ndarray, offered_at: np.ndarray, session: np.ndarray, stream: int) -> np.ndarray:
        return counter_uniform(self._seed, row, offered_at, session, stream)


def counter_uniform(seed: int | np.uint64, row: np.ndarray, *others: np.ndarray | int) -> np.ndarray:
    """Uniform numbers in [0, 1) of ``row``'s shape, a hash of seed and counters (SplitMix64's finaliser after each)."""
    x = np.full(len(row), np.uint64(int(seed) & 0xFFFFFFFFFFFFFFFF), np.uint64)
    for part in (row, *others):
        x = _mix(x + np.uint64(0x9E3779B97F4A7C15) + np.asarray(part).astype(np.uint64))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
