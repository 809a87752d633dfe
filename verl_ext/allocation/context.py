"""What an allocator sees of a step, and the checks on what it asks for and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .failures import Failures
from .groups import Group, Outcome, Request, RoundError
from .ledger import Ledger
from .prompt_pool import PromptPool
from .selectors.selector import Selector


class StepContext:
    """What an allocator sees of a step, and the only way it gets fresh groups."""

    def __init__(
        self,
        step: int,
        selector: Selector,
        ledger: Ledger,
        target_groups: int,
        budget: int,
        max_rounds: int,
        rng: np.random.Generator,
        pool: PromptPool | None = None,
        policy_version: int = 0,
        streaming: bool = False,
        failures: Failures | None = None,
        carry: int = 0,
        max_lag: int | None = None,
        generating: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.step = step
        self.policy_version = policy_version
        """Version of the weights that the step's batch updates; that of those that generate, unless they lag behind."""
        self.carry = carry
        """Groups beyond the batch that are to be in hand when the step ends, and go on in the next one; 0: none are."""
        self.max_lag = max_lag
        """Versions that a group of the batch may lag; None: nothing is carried."""
        self.streaming = streaming
        """Requests leave one by one, as outcomes come: ``ask`` may find groups in flight (``group.pending``)."""
        self.round = 0
        """Number of the current round, from 1; streaming, 1 in the step's first ``ask`` and 2 in all later ones."""
        self.max_rounds = max_rounds
        """Rounds of the step; streaming, requests of one group."""
        self.target_groups = target_groups
        """Groups wanted in the batch."""
        self.budget = budget
        """Rollouts the step may issue: what ``stop`` allows, or less where the selector has a budget of its own."""
        self.issued = 0
        """Rollouts issued so far in the step."""
        self.groups: list[Group] = []
        """All groups of the step, in order of admission."""
        self.exhausted = False
        """The selector gave fewer prompts than asked for: it has no more in this step."""
        self.rng = rng
        self.tokens_before = ledger.tokens
        """The ledger's response tokens when the step began."""
        self._selector = selector
        self._ledger = ledger
        self._pool = pool
        self._failures = failures
        self._generating = generating
        self._by_uid: dict[str, Group] = {}
        self._prompts: set[int] = set()
        self._fresh = 0

    @property
    def budget_left(self) -> int:
        """Rollouts that may still be issued."""
        return self.budget - self.issued

    @property
    def wanted(self) -> int:
        """Groups to plan for: those of the batch, and those to be carried beyond it."""
        return self.target_groups + self.carry

    @property
    def live(self) -> list[Group]:
        """Groups that may still be trained on, the oldest first."""
        return [group for group in self.groups if group.live]

    @property
    def generating(self) -> int:
        """Version of the weights that generate now."""
        version = self._generating()
        return self.policy_version if version is None else version

    @property
    def capacity(self) -> float:
        """Groups that may be admitted, so that all in hand are trained on within ``max_lag`` versions.

        With a batch B, weights of version v generating and batches up to that which updates version u accepted,
        (max_lag + v + 1) B - (u B + live). One that is given up gives its place back at once. Without a limit: all.
        """
        if self.max_lag is None:
            return float("inf")
        ahead = self.policy_version - self.generating
        return max(0, (self.max_lag + 1 - ahead) * self.target_groups - len(self.live))

    @property
    def epoch(self) -> int:
        """The prompts' epoch, from 0."""
        return 0 if self._pool is None else self._pool.epoch

    @property
    def rounds_left(self) -> int:
        """Rounds that may still generate, the current one included; streaming, of a group without a request yet."""
        return self.max_rounds if self.streaming else self.max_rounds - self.round + 1

    def rounds_of(self, group: Group) -> int:
        """Requests that may still be made of a group, one a round."""
        return self.max_rounds - group.requests if self.streaming else self.rounds_left

    def admit(self, n: int) -> list[Group]:
        """Up to ``n`` fresh groups, of the prompts the selector chooses.

        Raises:
            RoundError: the selector gave more than asked for, or a prompt this step has already.
        """
        n = min(n, self.capacity)
        if n <= 0 or self.exhausted:
            return []
        rows = self._selector.select(n)
        if len(rows) > n:
            raise RoundError(f"selector {type(self._selector).__name__} gave {len(rows)} prompts for {n}")
        self.exhausted = len(rows) < n
        fresh = []
        for row in rows:
            group = Group(f"s{self.step}g{self._fresh}", int(row), self.step, version=self.generating)
            self._fresh += 1
            self._add(group)
            fresh.append(group)
        return fresh

    def resume(self, group: Group) -> None:
        """Take up a group that waited: its rollouts are undecided again, its fate is this step's.

        Its prompt is not offered in this step.
        """
        self._add(group)
        self._ledger.unwait(group.outcomes)
        if self._pool is not None:
            self._pool.hold(group.prompt)

    def lag(self, group: Group) -> int:
        """Versions between the weights that were there when the group's prompt was offered, its oldest rollouts', and
        those that the step's batch updates."""
        return self.policy_version - group.version

    def request(self, group: Group, n: int) -> Request:
        """``n`` more rollouts of a group of this step."""
        return Request(group, n)

    def has(self, group: Group) -> bool:
        """Whether the group is of this step."""
        return self._by_uid.get(group.uid) is group

    def group(self, uid: str) -> Group:
        """The group of this step with that uid."""
        return self._by_uid[uid]

    def issue(self, requests: Sequence[Request]) -> int:
        """Check a round's requests and count them as issued; returns the number of rollouts.

        Raises:
            RoundError: beyond the budget, a group that is not of this step, or sessions that do not follow on.
        """
        total = sum(request.n for request in requests)
        if total > self.budget_left:
            raise RoundError(f"round {self.round} asks for {total} rollouts with {self.budget_left} left in the budget")
        for request in requests:
            group = request.group
            if self.streaming and (group.pending or group.requests >= self.max_rounds):
                raise RoundError(
                    f"step {self.step} asks for group {group.uid!r} with {group.pending} of its sessions in flight, "
                    f"after {group.requests} of max_rounds={self.max_rounds} requests"
                )
            if not self.has(group):
                raise RoundError(f"round {self.round} asks for group {group.uid!r}, which is not of step {self.step}")
            if request.first != group.requested:
                raise RoundError(
                    f"round {self.round} asks for group {group.uid!r} from session {request.first}; the next one is "
                    f"{group.requested}: one request a group and round"
                )
            group.requested += request.n
            group.requests += 1
        self.issued += total
        self._ledger.issue(total)
        for request in requests:
            self._selector.issued(request.group.prompt, request.n)
        return total

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Enter outcomes into their groups and the ledger; whole rounds or parts, in any order.

        A group all of whose rollouts failed is given up for the step: its verdict is DEFER from here on.

        Raises:
            RoundError: a session of no group of this step, never asked for, or told twice; or prompt after prompt
                fails.
        """
        by_uid = self._by_uid
        done = 0
        try:
            for outcome in outcomes:
                group = by_uid.get(outcome.group)
                if group is None:
                    raise RoundError(f"an outcome of group {outcome.group!r}, which is not of step {self.step}")
                group.add(outcome)
                done += 1
        finally:
            self._ledger.returned(outcomes if done == len(outcomes) else outcomes[:done])
        if self._failures is not None:
            for uid in dict.fromkeys(outcome.group for outcome in outcomes):
                if not by_uid[uid].pending:
                    self._failures.see(by_uid[uid])

    def _add(self, group: Group) -> None:
        if group.prompt in self._prompts or group.uid in self._by_uid:
            raise RoundError(f"prompt {group.prompt} (group {group.uid!r}) is offered twice in step {self.step}")
        group.requests = 0
        self._prompts.add(group.prompt)
        self._by_uid[group.uid] = group
        self.groups.append(group)
