"""The laboratory's rollout engine: sampling at temperature 1, where every prefix of an answer is computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl_ext.allocation.groups import Outcome, Request
from verl_ext.lab.decoder import Decoder, Forest
from verl_ext.simulation.simulated_backend import counter_uniform
from verl_ext.tiny.tokens import END_ID


@dataclass(slots=True)
class Trajectory:
    """One rollout, as the update reads it."""

    prompt: int
    """Row of the training prompts."""
    tokens: tuple[int, ...]
    """The answer, its end token included."""
    log_probs: np.ndarray
    """(tokens,), log-probability of each under the policy that generated it."""


class _Tree:
    """Answers of one prompt under the current weights: a node is a prefix, with its distribution and its cache slot."""

    __slots__ = ("children", "root")

    def __init__(self, root: int) -> None:
        self.root = root
        self.children: dict[tuple[int, int], int] = {}


class Engine:
    """A backend for `collect`. Draws are a function of the seed, the prompt, its visit and the rollout's number.

    Two runs of the same seed therefore draw the same numbers for the same visit of a prompt, whatever their rules.

    Args:
        policy: the policy; `refresh` must follow every change of its weights.
        prompts: token ids of the training prompts, by row of the pool.
        score: of a prompt's row and an answer without its end token (None: it did not end), right or wrong and reward.
        max_tokens: most tokens of an answer, the end token included.
        seed: of all draws.
    """

    def __init__(
        self,
        policy: Decoder,
        prompts: Sequence[Sequence[int]],
        score: Callable[[int, tuple[int, ...] | None], tuple[bool, float]],
        max_tokens: int,
        seed: int,
    ) -> None:
        self.policy, self.prompts, self.score, self.max_tokens, self.seed = policy, prompts, score, max_tokens, seed
        self.trajectories: dict[tuple[str, int], Trajectory] = {}
        """By group and session; the caller drops what it needs no longer (`keep`)."""
        self.device = next(policy.parameters()).device
        self._visits = np.zeros(len(prompts), np.int64)
        self._visit: dict[str, int] = {}
        self._longest = max(map(len, prompts)) + max_tokens
        s = policy.settings
        shape = (256, self._longest, s.num_key_value_heads, s.hidden_size // s.num_attention_heads)
        self._caches = [
            (torch.zeros(shape, device=self.device), torch.zeros(shape, device=self.device))
            for _ in range(s.num_hidden_layers)
        ]
        self._log_probs = np.zeros((256, s.vocab_size), np.float32)
        self._cdf = np.zeros((256, s.vocab_size), np.float32)
        self.refresh(0)

    def refresh(self, version: int) -> None:
        """The weights have changed: forget all that was computed with the old ones."""
        self.version = version
        self._trees: dict[int, _Tree] = {}
        self._used = 0

    def keep(self, groups: set[str]) -> None:
        """Forget the trajectories of all other groups."""
        self.trajectories = {key: t for key, t in self.trajectories.items() if key[0] in groups}
        self._visit = {uid: visit for uid, visit in self._visit.items() if uid in groups}

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Outcome]:
        """One outcome for every session, in the order of the requests."""
        rows, uids, sessions = [], [], []
        for request in requests:
            group = request.group
            if group.uid not in self._visit:
                self._visit[group.uid] = int(self._visits[group.prompt])
                self._visits[group.prompt] += 1
            rows += [group.prompt] * request.n
            uids += [group.uid] * request.n
            sessions += request.sessions
        self._plant(sorted(set(rows)))
        trees = [self._trees[row] for row in rows]
        visits = np.array([self._visit[uid] for uid in uids])
        nodes = np.array([tree.root for tree in trees])
        answers: list[list[int]] = [[] for _ in rows]
        log_probs: list[list[float]] = [[] for _ in rows]
        alive = np.arange(len(rows))
        keys, numbers = np.array(rows), np.array(sessions)
        for t in range(self.max_tokens):
            draw = counter_uniform(self.seed, keys[alive], visits[alive], numbers[alive], np.full(len(alive), t))
            cdf = self._cdf[nodes[alive]]
            tokens = (cdf <= (draw * cdf[:, -1])[:, None]).sum(1)
            taken = self._log_probs[nodes[alive], tokens]
            for i, token, value in zip(alive.tolist(), tokens.tolist(), taken.tolist(), strict=True):
                answers[i].append(token)
                log_probs[i].append(value)
            going = tokens != END_ID
            alive, tokens = alive[going], tokens[going]
            if t + 1 == self.max_tokens or not len(alive):
                break
            nodes[alive] = self._descend(
                [trees[i] for i in alive.tolist()], nodes[alive].tolist(), tokens.tolist(), rows, alive, t
            )
        outcomes = []
        for row, uid, session, answer, values in zip(rows, uids, sessions, answers, log_probs, strict=True):
            ended = answer[-1] == END_ID
            correct, score = self.score(row, tuple(answer[:-1]) if ended else None)
            self.trajectories[uid, session] = Trajectory(row, tuple(answer), np.array(values, np.float32))
            outcomes.append(
                Outcome(
                    uid, session, correct, score, len(self.prompts[row]), len(answer), False, not ended, self.version
                )
            )
        return outcomes

    def _plant(self, rows: list[int]) -> None:
        """Compute the prompts that are new under these weights."""
        rows = [row for row in rows if row not in self._trees]
        if not rows:
            return
        rows.sort(key=lambda row: len(self.prompts[row]))
        for start in range(0, len(rows), 256):
            part = rows[start : start + 256]
            forest = Forest()
            last = [forest.add_tree(self.prompts[row]) for row in part]
            forest.plant(self.device)
            kept: list[tuple[torch.Tensor, torch.Tensor]] = []
            hidden = self.policy(forest, kept)[last]
            slots = self._slots(len(part))
            tree = forest.slot // forest.shape[1] + slots[0]
            for (keys, values), (k, v) in zip(self._caches, kept, strict=True):
                keys[tree, forest.positions], values[tree, forest.positions] = k, v
            self._distributions(slots, hidden)
            for row, slot in zip(part, slots.tolist(), strict=True):
                self._trees[row] = _Tree(slot)

    def _descend(
        self, trees: list[_Tree], nodes: list[int], tokens: list[int], rows: list[int], alive: np.ndarray, t: int
    ) -> list[int]:
        """The children of nodes by tokens; those that are new are computed."""
        fresh: list[tuple[int, int, int]] = []
        places: list[tuple[_Tree, tuple[int, int]]] = []
        for tree, node, token, i in zip(trees, nodes, tokens, alive.tolist(), strict=True):
            if (node, token) not in tree.children:
                tree.children[node, token] = -1
                fresh.append((node, token, len(self.prompts[rows[i]]) + t))
                places.append((tree, (node, token)))
        if fresh:
            slots = self._slots(len(fresh))
            parents, new, positions = (torch.tensor(x, device=self.device) for x in zip(*fresh, strict=True))
            at = torch.from_numpy(slots).to(self.device)
            caches = [(keys[parents], values[parents]) for keys, values in self._caches]
            hidden = self.policy.extend(new, positions, caches)
            for (keys, values), (k, v) in zip(self._caches, caches, strict=True):
                keys[at], values[at] = k, v
            self._distributions(slots, hidden)
            for (tree, key), slot in zip(places, slots.tolist(), strict=True):
                tree.children[key] = slot
        return [tree.children[node, token] for tree, node, token in zip(trees, nodes, tokens, strict=True)]

    def _slots(self, n: int) -> np.ndarray:
        """``n`` new slots; the storage doubles where it is full."""
        while self._used + n > len(self._cdf):
            self._caches = [(torch.cat([k, k]), torch.cat([v, v])) for k, v in self._caches]
            self._log_probs, self._cdf = (np.concatenate([x, x]) for x in (self._log_probs, self._cdf))
        self._used += n
        return np.arange(self._used - n, self._used)

    def _distributions(self, slots: np.ndarray, hidden: torch.Tensor) -> None:
        log_probs = self.policy.log_probabilities(hidden)
        self._log_probs[slots] = log_probs.cpu().numpy()
        self._cdf[slots] = log_probs.exp().cumsum(-1).cpu().numpy()
