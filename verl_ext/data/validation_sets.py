"""AIME 2024, AIME 2025, AMC and MATH-500 for validation in verl.

    python -m verl_ext.data.validation_sets [--sets aime_2024 ...] [--input NAME=FILE ...] [--output FOLDER]

Files in verl's columns (the published AIME-2024 has each of its 30 prompts 32 times) and files of problems and answers
(Parquet or JSON lines) are read alike. Copies of a prompt are folded into one, their number in `extra_info.n`: what
they were there for is asked of verl by `actor_rollout_ref.rollout.val_kwargs.n`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_ext.data.dataset_files import (
    check_output,
    data_folder,
    download,
    fingerprint,
    finished,
    local_files,
    open_parquet,
    write,
)
from verl_ext.data.fold import Counts, Fold
from verl_ext.data.rows import DataError, answer_text, verl_row
from verl_ext.data.templates import TEMPLATES, ask, question_of

QUESTIONS = ("problem", "question", "Problem", "Question")
ANSWERS = ("answer", "Answer", "expected_answer", "final_answer")
INDICES = ("unique_id", "id", "ID", "index")


@dataclass(frozen=True)
class PublishedSet:
    """A published data set of problems with checkable answers."""

    hub: str
    """Repository on the hub."""
    patterns: tuple[str, ...]
    """Its files."""
    prompts: int | None
    """Different prompts that it has; None: not looked at."""


SETS = {
    "aime_2024": PublishedSet("BytedTsinghua-SIA/AIME-2024", ("data/*.parquet",), 30),
    "aime_2025": PublishedSet("math-ai/aime25", ("test.jsonl",), 30),
    # AMC 12 of 2022 and 2023.
    "amc": PublishedSet("AI-MO/aimo-validation-amc", ("data/*.parquet",), 83),
    "math_500": PublishedSet("HuggingFaceH4/MATH-500", ("test.jsonl",), 500),
}


def prepare(
    name: str,
    output: Path,
    inputs: Sequence[Path] | None = None,
    template: str = "dapo",
    any_count: bool = False,
    sets: Mapping[str, PublishedSet] = SETS,
) -> dict[str, Any]:
    """Make one set, or find it done.

    Args:
        name: a key of `sets`; becomes the rows' `data_source`, by which verl names its validation metrics.
        output: the Parquet file.
        inputs: local files; None: the hub.
        template: how the questions are put.
        any_count: accept another number of prompts than the published one.

    Raises:
        DataError: an input that cannot be used, or another number of prompts; names file, row and column.
    """
    known = sets[name]
    files = None if inputs is None else local_files(inputs)
    check_output(output, files or ())
    source = {"hub": known.hub} if files is None else {"files": [fingerprint(path) for path in files]}
    made_from = {"set": name, "template": template, **source}
    if (report := finished(output, made_from)) is not None:
        print(f"{name}: {output} is there already, {report['counts']['kept']} prompts", flush=True)
        return report
    if files is None:
        files = download(known.hub, list(known.patterns))
    fold, prompts, total = Fold(), [], 0
    for number, path in enumerate(files):
        for row, values in enumerate(read(path)):
            total += 1
            messages, answer, index = _problem(path, row, values, template)
            identity = "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in messages)
            if fold.add(identity, answer, 1, number, row).copies == 1:
                prompts.append((messages, index))
    counts = Counts.of(fold, total)
    names = ", ".join(map(str, files))
    if not counts.kept or not any_count and known.prompts not in (None, counts.kept):
        raise DataError(
            names,
            f"{name}: {counts.kept} prompts with an answer where {known.prompts or 'some'} are published; "
            f"{counts.describe()}. "
            "--any-count accepts another number",
        )
    rows, dropped = [], []
    for prompt, (messages, index) in zip(fold.prompts, prompts, strict=True):
        if prompt.reason is None:
            rows.append(verl_row(name, messages, prompt.answer, ability="MATH", index=index, n=prompt.copies))
        else:
            dropped.append({"reason": prompt.reason, "answers": prompt.answers or {prompt.answer: prompt.copies},
                            "file": files[prompt.file].name, "row": prompt.row, "prompt": messages})  # fmt: skip
    report = write(output, made_from, [rows], dropped, asdict(counts))
    print(f"{name}: {counts.describe()}\n  wrote {output}", flush=True)
    if counts.copies_most > 1:
        print(f"  the copies are asked for by actor_rollout_ref.rollout.val_kwargs.n={counts.copies_most}", flush=True)
    return report


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet or JSON-lines file.

    Raises:
        DataError: the file cannot be read; names the row.
    """
    if path.suffix == ".parquet":
        with open_parquet(path) as file:
            # A few rows at a time: whole solutions beside the answers take gigabytes.
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
        return
    with path.open("rb") as file:
        for row, line in enumerate(file):
            try:
                values = json.loads(line.decode("utf-8"))
            # JSON that is cut off or wrong, other bytes than UTF-8, or a number of thousands of digits.
            except ValueError as error:
                raise DataError(path, f"is not a JSON object ({error})", row) from error
            if not isinstance(values, dict):
                raise DataError(path, f"is not a JSON object but a {type(values).__name__}", row)
            yield values


def pick(path: Path, row: int, values: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """The first of the columns that the row has, and its value.

    Raises:
        DataError: it has none of them.
    """
    for name in names:
        if name in values:
            return name, values[name]
    raise DataError(path, f"missing; accepted are {', '.join(names)}, the row has {', '.join(values)}", row, names[0])


def _problem(
    path: Path, row: int, values: Mapping[str, Any], template: str
) -> tuple[list[dict[str, str]], str, str | None]:
    """Messages, answer and index of a row in verl's columns or of a problem with its answer."""
    if isinstance(values.get("prompt"), list):
        messages = [_message(path, row, message) for message in values["prompt"]]
        content = messages[-1]["content"] if messages else ""
        if not content.strip():
            raise DataError(path, "empty", row, "prompt.content")
        if template != "dapo":
            try:
                messages = [*messages[:-1], *ask(question_of(content), template)]
            except ValueError as error:
                raise DataError(path, str(error), row, "prompt.content") from error
        column, answer = "reward_model.ground_truth", _struct(path, row, values, "reward_model").get("ground_truth")
        index = _struct(path, row, values, "extra_info").get("index")
    else:
        column, question = pick(path, row, values, QUESTIONS)
        if not isinstance(question, str) or not question.strip():
            raise DataError(path, f"a question is needed, got {question!r}", row, column)
        messages = ask(question.strip(), template)
        column, answer = pick(path, row, values, ANSWERS)
        index = next((values[name] for name in INDICES if values.get(name) is not None), None)
    try:
        return messages, answer_text(answer), None if index is None else str(index)
    except TypeError as error:
        raise DataError(path, str(error), row, column) from error


def _message(path: Path, row: int, message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise DataError(path, f"messages with role and content are needed, got {message!r:.80}", row, "prompt")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise DataError(path, f"text is needed, got {message.get(name)!r:.80}", row, f"prompt.{name}")
    return {"role": message["role"], "content": message["content"]}


def _struct(path: Path, row: int, values: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    value = values.get(column)
    if value is not None and not isinstance(value, Mapping):
        raise DataError(path, f"an object with named fields is needed, got {value!r:.80}", row, column)
    return value or {}


def main(argv: list[str] | None = None, sets: Mapping[str, PublishedSet] = SETS, kind: str = "validation") -> None:
    """Command line."""
    said = f"{', '.join(sets)}: sets for {kind} in verl."
    parser = argparse.ArgumentParser(prog=f"python -m verl_ext.data.{kind}_sets", description=said)
    parser.add_argument("--sets", nargs="+", choices=sorted(sets), help="default: those of --input, or else all")
    parser.add_argument("--input", nargs="+", default=[], metavar="NAME=FILE", help="local files (default: the hub)")
    parser.add_argument("--output", type=Path, help="folder to write NAME.parquet to (default: $VERL_EXT_DATA)")
    parser.add_argument("--template", choices=sorted(TEMPLATES), default="dapo", help="as for the training data")
    parser.add_argument("--any-count", action="store_true", help="accept another number of prompts than published")
    args = parser.parse_args(argv)
    inputs: dict[str, list[Path]] = {}
    for given in args.input:
        name, equals, path = given.partition("=")
        if not equals or name not in sets:
            parser.error(f"--input {given}: NAME=FILE is accepted, with NAME one of {', '.join(sorted(sets))}")
        inputs.setdefault(name, []).append(Path(path))
    outputs = {name: (args.output or data_folder()).expanduser() / f"{name}.parquet"
               for name in args.sets or inputs or sets}  # fmt: skip
    for name in inputs.keys() - outputs.keys():
        parser.error(f"--input {name}={inputs[name][0]}: not one of --sets {' '.join(outputs)}; those are accepted")
    try:
        # One set's output may be another's input.
        files = local_files(path for paths in inputs.values() for path in paths)
        for output in outputs.values():
            check_output(output, files)
        for name, output in outputs.items():
            prepare(name, output, inputs.get(name), args.template, args.any_count, sets)
    except DataError as error:
        sys.exit(f"verl_ext: {error}")


if __name__ == "__main__":
    main()
