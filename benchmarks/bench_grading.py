"""Verdicts on pairs of answers beside math-verify alone and verl's math_dapo: right, false positive, false negative.

`python -m benchmarks.bench_grading` judges every pair of `benchmarks/grading_pairs*.tsv` in three forms with the three
graders, and writes the counts to `benchmarks/results/grading.json` and to the table in `docs/rewards.md`. `--wrong`
lists what ours gets wrong.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.result_files import write_result
from verl_ext.rewards import worker_pool as pool
from verl_ext.rewards.extract import final_answer
from verl_ext.rewards.math_verify import compute_score

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "grading.json"
DOC = HERE.parent / "docs" / "rewards.md"
TABLES = {
    "grading_pairs": "pairs that the rules were made with",
    "grading_pairs_new": "pairs written after the rules, which were mended once from them",
    "grading_pairs_last": "pairs written last, for which nothing was changed",
}
FORMS = {"line": "So it is done.\nAnswer: {}", "formula": "Hence\nAnswer: ${}$", "boxed": "Hence \\boxed{{{}}}."}
OUTCOMES = ("right", "false positive", "false negative", "unscored")
DEADLINE_S = 5.0


class Pair(NamedTuple):
    """An answer, and whether it is the true one."""

    kind: str
    truth: str
    answer: str
    right: bool


def pairs(table: str) -> Iterator[Pair]:
    """The pairs of one file.

    Raises:
        ValueError: a line that is no pair.
    """
    for number, line in enumerate((HERE / f"{table}.tsv").read_text("utf-8").splitlines(), 1):
        if not line.startswith("#"):
            parts = line.split("\t")
            if len(parts) != 4 or parts[3] not in "01":
                raise ValueError(f"{table}.tsv, line {number}: four columns with 0 or 1 at the end, got {line!r}")
            yield Pair(*parts[:3], parts[3] == "1")


def responses(pair: Pair) -> Iterator[str]:
    """The pair's answer in each of the forms; a `$` within `$...$` is no formula."""
    for form, text in FORMS.items():
        if form != "formula" or "$" not in pair.answer:
            yield text.format(pair.answer)


def same(true: str, response: str) -> bool:
    """math-verify alone, as its documentation shows it; called in a worker process."""
    from math_verify import parse, verify

    gold, answer = (parse(text, parsing_timeout=None) for text in (f"${true}$", response))
    return verify(gold, answer, timeout_seconds=None)


def ours(truth: str, response: str) -> bool | None:
    return compute_score("bench", response, truth, deadline_s=DEADLINE_S)["acc"]


def math_dapo(truth: str, response: str) -> bool | None:
    from verl.utils.reward_score.math_dapo import compute_score as published

    return bool(published(response, truth)["acc"])


def alone(workers: pool.WorkerPool) -> Callable[[str, str], bool | None]:
    """math-verify without what is built around it here, but bounded in time."""

    def judge(truth: str, response: str) -> bool | None:
        try:
            return workers.judge(truth, response)
        except pool.Unscored:
            return None

    return judge


def on_the_answer_found(
    judge: Callable[[str, str], bool | None],
) -> Callable[[str, str], bool | None]:
    """math-verify on the answer that verl_ext finds, so that what is found where makes no difference."""
    return lambda truth, response: judge(truth, f"\\boxed{{{final_answer(response)}}}")


def outcome(verdict: bool | None, right: bool) -> str:
    if verdict is None:
        return "unscored"
    if verdict == right:
        return "right"
    return "false positive" if verdict else "false negative"


def main() -> None:
    """Judge all pairs with all graders."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_grading")
    parser.add_argument("--wrong", action="store_true", help="list what ours gets wrong, and change no file")
    only_ours = parser.parse_args().wrong
    graders = {"verl_ext": ours}
    if not only_ours:
        pool.COMPARER = "benchmarks.bench_grading"
        workers = pool.WorkerPool(pool.PoolSettings(2, DEADLINE_S, 1024))
        for worker in workers._workers:
            worker.start()
        pool.COMPARER = "verl_ext.rewards.compare_answers"
        judge = alone(workers)
        graders |= {
            "math-verify 0.9.0 alone": judge,
            "math-verify 0.9.0 on the answer that verl_ext finds": on_the_answer_found(judge),
            "verl's `math_dapo`": math_dapo,
        }
    results = {}
    with ThreadPoolExecutor(4) as threads:
        for table in TABLES:
            cases = [(pair, response) for pair in pairs(table) for response in responses(pair)]
            for name, grader in graders.items():
                verdicts = list(threads.map(lambda case, judge=grader: judge(case[0].truth, case[1]), cases))
                outcomes = [outcome(verdict, case[0].right) for verdict, case in zip(verdicts, cases, strict=True)]
                counts = Counter(outcomes)
                results.setdefault(table, {"pairs": len(set(case[0] for case in cases)), "responses": len(cases)})
                results[table][name] = {what: counts[what] for what in OUTCOMES}
                print(f"{table:20} {name:26}", *(f"{what} {counts[what]:4}" for what in OUTCOMES), flush=True)
                if only_ours:
                    for (pair, response), what in zip(cases, outcomes, strict=True):
                        if what != "right":
                            print(f"  {what}: {pair.kind}: true {pair.truth!r}, response {response[-60:]!r}")
    pool.close_pools()
    if not only_ours:
        workers.close()
        write_result(RESULTS, results)
        DOC.write_text(re.sub(r"(<!-- grading -->\n).*(<!-- /grading -->)", rf"\1{_table(results)}\2", DOC.read_text(),
                              flags=re.DOTALL))  # fmt: skip


def _table(results: dict) -> str:
    lines = ["| | " + " | ".join(OUTCOMES) + " |", "|---" * (len(OUTCOMES) + 1) + "|"]
    for table, what in TABLES.items():
        counts = results[table]
        lines.append(f"| **{counts['pairs']} {what}, {counts['responses']} responses** |" + " |" * len(OUTCOMES))
        for name, row in counts.items():
            if isinstance(row, dict):
                lines.append(f"| {name} | " + " | ".join(str(row[what]) for what in OUTCOMES) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
