"""DAPO-Math-17K for verl: every prompt once.

    python -m verl_ext.data.dapo_math_17k [--input FILE.parquet ...] [--output FILE.parquet] [--template dapo|boxed]

The published file has about 1.79 million rows, each prompt about a hundred times. It is read in a stream, from the hub
or from local files; prompts whose copies disagree about the answer, or have none, are dropped and listed beside the
output. A finished output is recognised; one that was cut off is made again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_ext.data.dataset_files import check_output, data_folder, download, fingerprint, finished, local_files, write
from verl_ext.data.fold import Counts, Fold
from verl_ext.data.rows import DataError, verl_row
from verl_ext.data.scan import fetch, scan
from verl_ext.data.templates import TEMPLATES, ask, question_of

HUB = "BytedTsinghua-SIA/DAPO-Math-17k"
# What the published file is known to have, loosely: a download far from it is another file.
_PUBLISHED_ROWS = range(1_700_000, 1_900_000)
_PUBLISHED_PROMPTS = range(16_000, 19_000)
_CHUNK = 2048


def prepare(
    output: Path, inputs: Sequence[Path] | None = None, template: str = "dapo", revision: str | None = None
) -> dict[str, Any]:
    """Make the output, or find it done.

    Args:
        output: the Parquet file.
        inputs: local Parquet files or folders of them; None: the published file from the hub.
        template: `dapo` keeps the prompts as published; `boxed` puts their questions otherwise.
        revision: of the data set on the hub; None: the newest.

    Returns:
        The report: counts, and what the output was made from.

    Raises:
        DataError: an input that cannot be used; names file, row and column.
    """
    files = None
    if inputs is None:
        made_from: dict[str, Any] = {"hub": HUB, "revision": revision, "template": template}
    else:
        files = local_files(inputs)
        for path in files:
            if path.suffix != ".parquet":
                raise DataError(path, "a .parquet file is needed")
        made_from = {"files": [fingerprint(path) for path in files], "template": template}
    check_output(output, files or ())
    if (report := finished(output, made_from)) is not None:
        print(f"{output} is there already: {_counts(report).describe()}", flush=True)
        return report
    if files is None:
        print(f"Fetching {HUB} from the hub", flush=True)
        files = download(HUB, ["data/*.parquet"], revision)
    print(f"Reading {', '.join(map(str, files))}", flush=True)
    fold, rows = scan(files)
    counts = Counts.of(fold, rows)
    if inputs is None:
        _check_published(counts)
    if not counts.kept:
        raise DataError(", ".join(map(str, files)), f"no prompt is left: {counts.describe()}")
    dropped: list[dict[str, Any]] = []
    report = write(output, made_from, _rows(files, fold, template, dropped), dropped, asdict(counts))
    print(f"{counts.describe()}\nWrote {output}" + (f"; the dropped are listed in {output.stem}.dropped.jsonl"
                                                    if dropped else ""), flush=True)  # fmt: skip
    return report


def _rows(
    files: Sequence[Path], fold: Fold, template: str, dropped: list[dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Rows of the output, some at a time; the dropped prompts are listed on the way."""
    chunk: list[dict[str, Any]] = []
    published = fetch(files, [(prompt.file, prompt.row) for prompt in fold.prompts])
    for prompt, row in zip(fold.prompts, published, strict=True):
        path = files[prompt.file]
        if prompt.reason is not None:
            dropped.append({"reason": prompt.reason, "answers": prompt.answers or {prompt.answer: prompt.copies},
                            "file": path.name, "row": prompt.row, "prompt": row["prompt"]})  # fmt: skip
            continue
        if not row["data_source"]:
            raise DataError(path, "empty", prompt.row, "data_source")
        messages = row["prompt"]
        if template != "dapo":
            try:
                messages = [*messages[:-1], *ask(question_of(messages[-1]["content"]), template)]
            except ValueError as error:
                raise DataError(path, str(error), prompt.row, "prompt.content") from error
        index = (row.get("extra_info") or {}).get("index")
        chunk.append(
            verl_row(
                row["data_source"], messages, prompt.answer, ability=row.get("ability") or "MATH",
                index=None if index is None else str(index), n=prompt.copies,
                style=row["reward_model"].get("style") or "rule",
            )
        )  # fmt: skip
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    yield chunk


def _check_published(counts: Counts) -> None:
    for what, value, accepted in (
        ("rows", counts.rows, _PUBLISHED_ROWS), ("prompts", counts.prompts, _PUBLISHED_PROMPTS),
    ):  # fmt: skip
        if value not in accepted:
            raise DataError(
                f"hub data set {HUB}",
                f"{value:,} {what} where {accepted.start:,} to {accepted[-1]:,} are expected: {counts.describe()}. "
                "If the publisher has changed the file, give it with --input",
            )


def _counts(report: dict[str, Any]) -> Counts:
    return Counts(**report["counts"])


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m verl_ext.data.dapo_math_17k", description="DAPO-Math-17K for verl: every prompt once."
    )
    parser.add_argument("--input", type=Path, nargs="+", help="local Parquet files, or folders (default: the hub)")
    parser.add_argument("--output", type=Path, help="file to write (default: $VERL_EXT_DATA/dapo_math_17k.parquet)")
    parser.add_argument("--template", choices=sorted(TEMPLATES), default="dapo", help="dapo: the prompts as published")
    parser.add_argument("--revision", help="revision of the data set on the hub")
    args = parser.parse_args(argv)
    output = (args.output or data_folder() / "dapo_math_17k.parquet").expanduser()
    if output.suffix != ".parquet":
        parser.error(f"--output {output}: a name ending in .parquet is accepted")
    try:
        prepare(output, args.input, args.template, args.revision)
    except DataError as error:
        sys.exit(f"verl_ext: {error}")


if __name__ == "__main__":
    main()
