"""Every number of the tiny task and its policy, in one place.

The two groups of settings are kept apart because the pre-trained policy does not depend on which prompts reinforcement
learning (RL) uses: both mixes share one policy, and so one pre-training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field

# Part of every cache key. Raise it when code changes what is written for the same settings.
FORMAT = 2

DIFFICULTIES = 6  # total // 10 = 0..5: totals of 60 and more are left out

MIXES: dict[str, tuple[float, ...]] = {
    "balanced": (0.40, 0.10, 0.10, 0.10, 0.15, 0.15),
    "sparse": (0.40, 0.01, 0.01, 0.02, 0.04, 0.52),
}
"""Share of difficulty 0..5 among the RL prompts, by name of the mix.

`balanced` has prompts of every success rate; in `sparse` most are solved or hopeless, which is the regime where it
matters which prompts are chosen. Expected for the policy of the package (k = 8, 4,096 training / 256 held-out prompts;
`python -m verl_ext.tiny.prepare --measure` prints it anew):

    mix        mean@8       greedy       effective share   0 of 8       8 of 8
    balanced   .455 / .444  .491 / .496  .415 / .425       .312 / .319  .273 / .256
    sparse     .389 / .384  .408 / .410  .199 / .222       .528 / .522  .273 / .256
"""


def _require(ok: bool, name: str, value: object, accepted: str) -> None:
    if not ok:
        raise ValueError(f"TinySettings: {name} must be {accepted}, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class PolicySettings:
    """What the pre-trained policy depends on."""

    seed: int = 0
    """Seed of the weights and of the pre-training corpus."""
    min_digits: int = 2
    """Fewest digits in a sum."""
    max_digits: int = 8
    """Most digits in a sum."""
    held_out_percent: int = 20
    """Percentage of the digit multisets that neither pre-training nor RL may see."""
    forget_probability: float = 0.5
    """Probability with which the sloppy adder, who wrote the pre-training corpus, forgets a carried ten."""
    vocab_size: int = 264
    """Rows of the embedding: 256 bytes, 3 special tokens, padded to a multiple of 8."""
    hidden_size: int = 128
    """Width of the residual stream."""
    intermediate_size: int = 512
    """Width of the feed-forward layers."""
    num_layers: int = 2
    """Transformer layers."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key-value heads."""
    max_position_embeddings: int = 512
    """Longest sequence (tokens) that the configuration admits; the task needs 19."""
    steps: int = 1200
    """Optimizer steps of pre-training."""
    batch_size: int = 256
    """Sums in a pre-training step."""
    learning_rate: float = 2e-3
    """Peak learning rate of AdamW."""
    beta1: float = 0.9
    """AdamW's first beta."""
    beta2: float = 0.98
    """AdamW's second beta."""
    warmup_steps: int = 30
    """Steps of linear warm-up; the rate then falls linearly to 0."""
    clip_norm: float = 1.0
    """Gradients are clipped to this global norm."""
    shards: int = 4
    """Parts of similar length into which a batch is cut, so that little is padded."""
    threads: int = 2
    """Shards worked on at once. Changes the time and not the result."""

    def __post_init__(self) -> None:
        whole = ["hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "steps", "batch_size"]
        for name in [*whole, "shards", "threads"]:
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, name, value, "an integer of at least 1")
        for name in ("seed", "warmup_steps"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 0, name, value, "an integer of at least 0")
        _require(_is_int(self.min_digits) and 2 <= self.min_digits, "min_digits", self.min_digits, "an integer >= 2")
        _require(
            _is_int(self.max_digits) and self.min_digits <= self.max_digits,
            "max_digits",
            self.max_digits,
            f"an integer >= min_digits ({self.min_digits})",
        )
        percent = self.held_out_percent
        _require(_is_int(percent) and 1 <= percent <= 99, "held_out_percent", percent, "an integer from 1 to 99")
        p = self.forget_probability
        _require(_is_number(p) and 0 <= p <= 1, "forget_probability", p, "a number from 0 to 1")
        rows = self.vocab_size
        _require(_is_int(rows) and rows >= 259, "vocab_size", rows, "an integer >= 259 (256 bytes, 3 special tokens)")
        width, heads = self.hidden_size, self.num_heads
        _require(width % (2 * heads) == 0, "hidden_size", width, f"a multiple of 2 x num_heads ({heads})")
        _require(heads % self.num_kv_heads == 0, "num_kv_heads", self.num_kv_heads, f"a divisor of num_heads ({heads})")
        longest = 2 * self.max_digits + 3
        positions = self.max_position_embeddings
        enough = _is_int(positions) and positions >= longest
        _require(enough, "max_position_embeddings", positions, f"an integer >= {longest}")
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            _require(_is_number(value) and value > 0, name, value, "a number above 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(_is_number(value) and 0 <= value < 1, name, value, "a number in [0, 1)")


@dataclass(frozen=True)
class TinySettings:
    """The whole preparation: policy and RL data.

    Raises:
        ValueError: a setting is out of range; the message names it, its value and what is accepted.
    """

    mix: str = "balanced"
    """Which of `MIXES` the RL prompts follow; ignored where `shares` is given."""
    shares: tuple[float, ...] | None = None
    """Shares of difficulty 0..5 for a mix of one's own; they must add up to 1."""
    train_size: int = 4096
    """Different prompts in train.parquet."""
    val_size: int = 256
    """Different held-out prompts in val.parquet."""
    seed: int = 0
    """Seed of the choice of RL prompts."""
    policy: PolicySettings = field(default_factory=PolicySettings)
    """The policy and its pre-training."""

    def __post_init__(self) -> None:
        _require(self.mix in MIXES, "mix", self.mix, f"one of {sorted(MIXES)}")
        for name in ("train_size", "val_size"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, name, value, "an integer of at least 1")
        _require(_is_int(self.seed) and self.seed >= 0, "seed", self.seed, "an integer of at least 0")
        _require(isinstance(self.policy, PolicySettings), "policy", self.policy, "a PolicySettings")
        if self.shares is not None:
            good = (
                isinstance(self.shares, tuple)
                and len(self.shares) == DIFFICULTIES
                and all(_is_number(s) and s >= 0 for s in self.shares)
                and abs(sum(self.shares) - 1) < 1e-9
            )
            _require(good, "shares", self.shares, f"a tuple of {DIFFICULTIES} numbers >= 0 that add up to 1")

    @property
    def difficulty_shares(self) -> tuple[float, ...]:
        """Shares of difficulty 0..5 in force."""
        return self.shares if self.shares is not None else MIXES[self.mix]


def policy_key(settings: PolicySettings) -> str:
    """Hash of all that the pre-trained policy depends on (12 hexadecimal digits)."""
    content = dataclasses.asdict(settings)
    del content["threads"]
    return _hash({"policy": content})


def data_key(settings: TinySettings) -> str:
    """Hash of all that the two parquet files depend on (12 hexadecimal digits)."""
    p = settings.policy
    return _hash(
        {
            "shares": settings.difficulty_shares,
            "sizes": (settings.train_size, settings.val_size),
            "seed": settings.seed,
            "task": (p.min_digits, p.max_digits, p.held_out_percent),
        }
    )


def _hash(content: dict) -> str:
    text = json.dumps({"format": FORMAT, **content}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
