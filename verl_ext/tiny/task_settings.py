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

from verl_ext.typed_settings import is_number, is_whole, require_all

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


def _within(value: object, least: float, most: float) -> bool:
    return is_number(value) and least <= value <= most


def _require(settings: object, *checks: tuple[str, bool, str]) -> None:
    """Name, whether it fits, and what is accepted, of each setting."""
    require_all(*((fits, f"tiny.{name}", getattr(settings, name), accepted) for name, fits, accepted in checks))


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
        counts = dict.fromkeys(
            ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "steps", "batch_size",
             "shards", "threads"), 1,
        ) | {"seed": 0, "warmup_steps": 0, "min_digits": 2, "vocab_size": 259}  # fmt: skip
        _require(
            self,
            *((name, is_whole(getattr(self, name), least), f"an integer >= {least}") for name, least in counts.items()),
            ("held_out_percent", is_whole(self.held_out_percent, 1) and self.held_out_percent < 100, "from 1 to 99"),
            ("forget_probability", _within(self.forget_probability, 0, 1), "a number from 0 to 1"),
            *((name, _within(getattr(self, name), 1e-12, math.inf), "a number above 0")
              for name in ("learning_rate", "clip_norm")),
            *((name, _within(getattr(self, name), 0, 1 - 1e-12), "a number in [0, 1)") for name in ("beta1", "beta2")),
        )  # fmt: skip
        heads, fewest = self.num_heads, self.min_digits
        longest = 2 * self.max_digits + 3 if is_whole(self.max_digits) else 19
        _require(
            self,
            ("max_digits", is_whole(self.max_digits, fewest), f"an integer >= min_digits ({fewest})"),
            ("hidden_size", self.hidden_size % (2 * heads) == 0, f"a multiple of 2 x num_heads ({heads})"),
            ("num_kv_heads", heads % self.num_kv_heads == 0, f"a divisor of num_heads ({heads})"),
            ("max_position_embeddings", is_whole(self.max_position_embeddings, longest), f"an integer >= {longest}"),
        )


@dataclass(frozen=True)
class TinySettings:
    """The whole preparation: policy and RL data.

    Raises:
        SettingError: a setting is out of range.
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
        given = self.shares
        fit = given is None or (
            isinstance(given, tuple)
            and len(given) == DIFFICULTIES
            and all(is_number(share) and share >= 0 for share in given)
            and abs(sum(given) - 1) < 1e-9
        )
        _require(
            self,
            ("mix", self.mix in MIXES, f"one of {sorted(MIXES)}"),
            ("train_size", is_whole(self.train_size, 1), "an integer >= 1"),
            ("val_size", is_whole(self.val_size, 1), "an integer >= 1"),
            ("seed", is_whole(self.seed, 0), "an integer >= 0"),
            ("shares", fit, f"a tuple of {DIFFICULTIES} numbers >= 0 that add up to 1"),
        )

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
