"""Probe more prompts than the batch needs, and finish those whose outcomes vary most."""

from dataclasses import dataclass

from verl_ext.allocation import Allocator, AllocatorSettings, Verdict
from verl_ext.typed_settings import require


@dataclass(frozen=True)
class BestOfProbesSettings(AllocatorSettings):
    """Settings of best_of_probes."""

    probe: int = 4
    """Rollouts of a prompt's probe."""
    probes: float = 2.0
    """Prompts probed, in units of the batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(2 <= self.probe < self.group_size, "allocation.allocator.probe", self.probe,
                f"an integer in [2, group_size={self.group_size})")  # fmt: skip
        require(1 <= self.probes <= 100, "allocation.allocator.probes", self.probes, "a number in [1, 100]")


class BestOfProbes(Allocator):
    """Two rounds: probes of probes x stop.groups prompts; the rest of the rollouts for those with p (1 - p) largest."""

    Settings = BestOfProbesSettings

    def ask(self, ctx):
        probe, rest = self.settings.probe, self.group_size - self.settings.probe
        if ctx.round == 1:
            wanted = round(self.settings.probes * ctx.target_groups)
            # Leave what the best of them will need.
            finished = min(ctx.target_groups, ctx.budget_left // self.group_size)
            probed = min(wanted, (ctx.budget_left - finished * rest) // probe)
            return [ctx.request(group, probe) for group in ctx.admit(probed if finished else 0)]
        if ctx.round > 2:
            return []
        ties = ctx.rng.permutation(len(ctx.groups)).tolist()
        best = sorted(zip(ctx.groups, ties, strict=True), key=lambda pair: (-self._variance(pair[0]), pair[1]))
        for group, _ in best[: min(ctx.target_groups, ctx.budget_left // rest)]:
            group.verdict = Verdict.COMMIT
        return [ctx.request(group, rest) for group in ctx.groups if group.verdict is Verdict.COMMIT]

    def finish(self, ctx):
        for group in ctx.groups:
            if group.verdict is not Verdict.COMMIT:
                group.verdict = Verdict.ABANDON
        return [group for group in ctx.groups if group.verdict is Verdict.COMMIT]

    def _variance(self, group):
        return round(group.successes * (group.trials - group.successes) / max(1, group.trials) ** 2, 12)
