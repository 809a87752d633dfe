"""Published headline figures, and which numbers of `benchmarks.published_runs` stand beside each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.published_runs import COSTS, DRIFTS, EXTREMES, LENGTHS, OTHERS, RATIOS, VARIANTS
from benchmarks.published_runs import UPDATES as ALL

SARA, PILOT, CERO, PODS = "2607.26253", "2605.26606", "2606.05606", "2504.13818"


@dataclass(frozen=True)
class Claim:
    """A claim in one setting."""

    claim: str
    source: str
    """arXiv number."""
    published: str
    setting: str
    """Of ours."""
    experiment: str
    ours: tuple[tuple[str, str], ...]
    """Label and key of each number."""
    least: float | None = None
    """The claim holds here if every number is at least this."""
    most: float | None = None
    """Or at most this."""
    by: tuple[str, ...] = ()
    """Keys that are held against the bounds, where they are others than those shown."""
    points: bool = False
    """The numbers are shares, shown in per cent or points."""
    why: str = ""
    """What to know; above all why it is not reached, where it is not."""


def _each(pattern: str, values) -> tuple[tuple[str, str], ...]:
    return tuple((str(value), pattern.format(value)) for value in values)


_DROP = {"waves of 1B": "waves of 1B", "waves of 3B": "waves of 3B", "one for one": "one-for-one refill"}
_SPLITS = ("16 + 48, [.125, .75]", "4 + 60", "32 + 32")
_BANDS = tuple(name for name in VARIANTS if name not in _SPLITS[1:])


def _against_dynamic_sampling() -> Iterator[Claim]:
    fewer, most = "fewer rollouts than dynamic sampling", 0.78
    waste = "about half of the saving is what waves waste; refilling one for one wastes nothing"
    for waves, name in _DROP.items():
        why = waste if waves == "one for one" else ""
        ours = (("", f"rollouts, {waves}"),)
        yield Claim(f"SARA: 22 % {fewer}", SARA, "ratio .78", f"frozen; {name}", "collection", ours, most=most, why=why)
    for waves, name in _DROP.items():
        why = waste if waves == "one for one" else ""
        ours = _each("SARA / " + waves + ", {}", ALL)
        setting = f"learning, to accuracy .65 with equal batches; {name}"
        yield Claim(f"SARA: 22 % {fewer}", SARA, "ratio .78", setting, "learning", ours, most=most, why=why)
    claim, most = f"SARA + DPS: 67 % {fewer}", 0.33
    why = "close: some of the prompts that DPS chooses are still abandoned, see its cost below"
    setting, ours = "frozen, after 50 steps; waves of 1B", (("", "SARA + DPS, warm"),)
    yield Claim(claim, SARA, "ratio .33", setting, "collection", ours, most=most, why=why)
    why = "while the policy learns, what DPS knows of a prompt ages, and more of its choices are saturated"
    for waves, name in _DROP.items():
        setting, ours = (
            f"learning, to accuracy .65 with equal batches; {name}",
            _each("SARA + DPS / " + waves + ", {}", ALL),
        )
        yield Claim(claim, SARA, "ratio .33", setting, "learning", ours, most=most, why=why)
    claim, setting = "SARA + DPS: near uniform sampling's cost", "rollouts a step over B k"
    why = "a full batch takes more prompts than B while some of those chosen are abandoned"
    ours = (("", "SARA + DPS, warm, to uniform's cost"),)
    yield Claim(claim, SARA, "about 1", f"{setting}; frozen, after 50 steps", "collection", ours, most=1.1, why=why)
    why = "as above; `stop.rollouts` = B k holds the cost and makes the batches smaller"
    ours = _each("SARA + DPS to uniform's cost a step, {}", ALL)
    yield Claim(claim, SARA, "about 1", f"{setting}; learning", "learning", ours, most=1.1, why=why)


def _of_batches() -> Iterator[Claim]:
    times = ", ".join(map(str, LENGTHS))
    yield Claim(
        "SARA saves tokens beyond rollouts: abandoned all-fail answers are long", SARA, "no figure known to us",
        f"frozen; tokens per effective group over waves of 1B's, wrong answers {times} times as long as right ones",
        "collection", _each("tokens, wrong x{}, waves of 1B", LENGTHS), most=1.0,
        by=tuple(f"tokens over rollouts, wrong x{factor}, waves of 1B" for factor in LENGTHS[1:]),
        why="a little beyond: dynamic sampling drops the same long answers, eight a prompt for SARA's four",
    )  # fmt: skip
    setting = "learning, and a random walk of each prompt's logit by 0, .1, .3 a step; effective groups over B"
    claim = "SARA: batches nearly all effective while the policy drifts"
    why = "follows from the rule unless budget or rounds run out"
    yield Claim(
        claim, SARA, "about 100 %", setting, "drifting", _each("SARA, drift {}", DRIFTS), least=0.99, points=True,
        why=why,
    )  # fmt: skip
    for name in ("uniform", "DPS"):
        yield Claim(
            f"the same, {name} for comparison", "", "", setting, "drifting", _each(name + ", drift {}", DRIFTS),
            points=True,
        )  # fmt: skip
    setting = "learning, 150 steps of B k rollouts; effective groups of those trained on"
    yield Claim(
        "CERO: a higher effective share at equal budget", CERO, "above uniform's", setting, "equal_budget",
        _each("effective share, CERO, {}", ALL), points=True, least=0.0,
        by=tuple(f"effective share, CERO less uniform, {update}" for update in ALL),
    )  # fmt: skip
    for name in ("uniform", "DPS"):
        yield Claim(
            f"the same, {name} for comparison", "", "", setting, "equal_budget",
            _each("effective share, " + name + ", {}", ALL), points=True,
        )  # fmt: skip
    yield Claim(
        "CERO: more accurate than GRPO at equal budget", CERO, "+1.5 to +6.0 points on benchmarks",
        "as above; held-out accuracy less uniform's", "equal_budget",
        _each("accuracy gained on uniform, CERO, {}", ALL), least=0.015, points=True,
        why="the direction is comparable, points are not: our held-out prompts are of the pool's own kind",
    )  # fmt: skip


def _of_pilot_commit() -> Iterator[Claim]:
    setting = "learning, to accuracy .65; 16 + 48 of 64"
    yield Claim(
        "Pilot-Commit: 1.5 to 1.9 times fewer rollouts than GRPO", PILOT, "1.5 to 1.9", setting, "pilot_commit",
        _each("GRPO / Pilot-Commit, {}", EXTREMES), least=1.5,
        why="near it where an update's length counts (linear). With a normalised update a full batch is not worth 1.7 "
        "times the rollouts of a step. The published counts a step fit the linear model alone",
    )  # fmt: skip
    yield Claim(
        "Pilot-Commit: 2.3 to 4.0 times fewer rollouts than DAPO", PILOT, "2.3 to 4.0", f"{setting}; waves of 3B x 64",
        "pilot_commit", _each("DAPO / Pilot-Commit, {}", EXTREMES), least=2.3,
        why="with a normalised update both fill their batches, and only what a batch costs differs; 4 in neither",
    )  # fmt: skip
    yield Claim(
        "Pilot-Commit: a step takes 1.5 times GRPO's rollouts", PILOT, "1.5", setting, "pilot_commit",
        _each("rollouts a step to GRPO's, {}", EXTREMES), most=1.5,
        why="0.75 + 0.25 / (share of pilots in the band): about a quarter passes here; a third would give 1.5",
    )  # fmt: skip
    setting, none = "as above, linear; GRPO's rollouts over its", "no figure known to us; here within 10 %"
    for claim, names, why in (
        ("split", _SPLITS, "on a U-shaped pool 4 rollouts tell most saturated prompts; a pilot of 32 loses to GRPO"),
        ("band", _BANDS, "pilots outside a narrow band are paid for and dropped"),
    ):
        yield Claim(
            f"Pilot-Commit: robust to the {claim}", PILOT, none, setting, "robustness",
            _each("GRPO / Pilot-Commit, {}", names), least=0.9, most=1.1,
            by=tuple(f"over the default's, {name}" for name in names[1:]), why=why,
        )  # fmt: skip


def _of_pods() -> Iterator[Claim]:
    costs = ", ".join(f"{cost:g}" for cost in COSTS)
    reasons = {
        16: "it generates four times as much: a gain only where generation is nearly free; the limit here is below 1.7",
        64: "with as many rollouts, all of them updated on, it is the update that is saved",
    }
    for size, why in reasons.items():
        for update in EXTREMES:
            yield Claim(
                "PODS: 1.7 times faster to the baseline's best", PODS, "1.7 or more",
                f"64 -> 16 against {size} / {size}, {update}; an updated row costs {costs} generated rollouts", "pods",
                tuple((f"{cost:g}", f"GRPO {size} / PODS, c_u/c_g {cost:g}, {update}") for cost in COSTS), least=1.7,
                why=why,
            )  # fmt: skip
    ratios = ", ".join(map(str, RATIOS))
    for by in OTHERS:
        yield Claim(
            f"PODS: max_variance better than {by}", PODS, "better",
            f"accuracy gained in 30 steps, less the other's; linear, m = 8, n / m = {ratios}", "downsampling",
            tuple((str(ratio), f"gain over {by}, n/m {ratio}") for ratio in RATIOS), least=0.0, points=True,
            why="by construction: progress in this world is the spread of the rows trained on",
        )  # fmt: skip


CLAIMS = (*_against_dynamic_sampling(), *_of_batches(), *_of_pilot_commit(), *_of_pods())


def verdict(claim: Claim, found: dict[str, Any]) -> str:
    """Of the claim's numbers: yes | no | open (an interval lies across the bound) | in part; empty without a bound."""
    if claim.least is None and claim.most is None:
        return ""
    states = set()
    for key in claim.by or [key for _, key in claim.ours]:
        number = found[claim.experiment][key]
        if number["mean"] is None:
            states.add("no")
            continue
        inside, outside = True, False
        if claim.least is not None:
            inside, outside = number["low"] >= claim.least, number["high"] < claim.least
        if claim.most is not None:
            inside, outside = inside and number["high"] <= claim.most, outside or number["low"] > claim.most
        states.add("yes" if inside else "no" if outside else "open")
    if len(states) == 1:
        return states.pop()
    return "in part" if "yes" in states else "open"


def shown(number: dict[str, Any], points: bool) -> str:
    """Mean and half of the interval, as it stands in the table."""
    if number["mean"] is None:
        return f"not reached ({number['finite']} of {number['seeds']} seeds reach it)"
    scale = 100 if points else 1
    digits = 1 if points else 2
    half = (number["high"] - number["low"]) / 2 * scale
    return f"{number['mean'] * scale:.{digits}f} ± {half:.{digits}f}" + (" %" if points else "")


def table(record: dict[str, Any]) -> str:
    """The claims as Markdown."""
    lines = [
        "| claim | source | published | ours | setting of ours | reached | why, or what to know |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["claims"]:
        ours = "; ".join(f"{label}: {value}" if label else value for label, value in row["ours"])
        cells = (row["claim"], row["source"], row["published"], ours, row["setting"], row["reached"], row["why"])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def judged(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The claims with our numbers and what they say."""
    return [
        {
            "claim": claim.claim,
            "source": claim.source,
            "published": claim.published,
            "setting": claim.setting,
            "ours": [(label, shown(found[claim.experiment][key], claim.points)) for label, key in claim.ours],
            "reached": verdict(claim, found),
            "why": claim.why,
        }
        for claim in CLAIMS
        if claim.experiment in found
    ]
