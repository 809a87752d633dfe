"""GSM8K for verl.

    python -m verl_ext.data.gsm8k [--train FILE --test FILE] [--output FOLDER] [--template boxed|dapo]

From the hub (openai/gsm8k) or from local Parquet or JSON-lines files with `question` and `answer`, whose last line is
`#### 42`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_ext.data.dataset_files import check_output, data_folder, download, fingerprint, finished, local_files, write
from verl_ext.data.fold import Counts, Fold
from verl_ext.data.rows import DataError, verl_row
from verl_ext.data.templates import TEMPLATES, ask
from verl_ext.data.validation_sets import pick, read

HUB = "openai/gsm8k"
SPLITS = ("train", "test")
_FINAL = re.compile(r"####\s*([^\n]+?)\s*$")


def final_answer(solution: str) -> str:
    """The number after `####`, without separators of thousands.

    Raises:
        ValueError: there is none.
    """
    found = _FINAL.search(solution)
    if found is None:
        raise ValueError(f"no line '#### ANSWER' at the end of {solution[-60:]!r}")
    return found.group(1).replace(",", "").lstrip("$")


def prepare(split: str, output: Path, inputs: Sequence[Path] | None = None, template: str = "boxed") -> dict[str, Any]:
    """Make one split, or find it done.

    Raises:
        DataError: an input that cannot be used; names file, row and column.
    """
    files = None if inputs is None else local_files(inputs)
    check_output(output, files or ())
    source = {"hub": HUB} if files is None else {"files": [fingerprint(path) for path in files]}
    made_from = {"set": "gsm8k", "split": split, "template": template, **source}
    if (report := finished(output, made_from)) is not None:
        print(f"gsm8k: {output} is there already, {report['counts']['kept']} prompts", flush=True)
        return report
    if files is None:
        files = download(HUB, [f"main/{split}-*.parquet"])
    fold, questions, total = Fold(), [], 0
    for number, path in enumerate(files):
        for row, values in enumerate(read(path)):
            total += 1
            _, question = pick(path, row, values, ("question",))
            _, solution = pick(path, row, values, ("answer",))
            if not isinstance(question, str) or not question.strip():
                raise DataError(path, f"a question is needed, got {question!r}", row, "question")
            try:
                answer = final_answer(solution if isinstance(solution, str) else "")
            except ValueError as error:
                raise DataError(path, str(error), row, "answer") from error
            if fold.add(question, answer, 1, number, row).copies == 1:
                questions.append((question.strip(), f"{split}-{row}"))
    counts = Counts.of(fold, total)
    if not counts.kept:
        raise DataError(", ".join(map(str, files)), f"no prompt is left: {counts.describe()}")
    rows, dropped = [], []
    for prompt, (question, index) in zip(fold.prompts, questions, strict=True):
        messages = ask(question, template)
        if prompt.reason is None:
            rows.append(verl_row("openai/gsm8k", messages, prompt.answer, ability="math", index=index, n=prompt.copies))
        else:
            dropped.append({"reason": prompt.reason, "answers": prompt.answers or {prompt.answer: prompt.copies},
                            "file": files[prompt.file].name, "row": prompt.row, "prompt": messages})  # fmt: skip
    report = write(output, made_from, [rows], dropped, asdict(counts))
    print(f"gsm8k {split}: {counts.describe()}\n  wrote {output}", flush=True)
    return report


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.data.gsm8k", description="GSM8K for verl.")
    for split in SPLITS:
        parser.add_argument(f"--{split}", type=Path, nargs="+", help=f"local files of the {split} split")
    parser.add_argument("--output", type=Path, help="folder to write gsm8k_*.parquet to (default: $VERL_EXT_DATA)")
    parser.add_argument("--template", choices=sorted(TEMPLATES), default="boxed", help="how the questions are put")
    args = parser.parse_args(argv)
    folder = (args.output or data_folder()).expanduser()
    given = {split: getattr(args, split) for split in SPLITS}
    chosen = [split for split in SPLITS if given[split]] or SPLITS
    outputs = {split: folder / f"gsm8k_{split}.parquet" for split in chosen}
    try:
        # One split's output may be another's input.
        files = local_files(path for split in chosen for path in given[split] or ())
        for output in outputs.values():
            check_output(output, files)
        for split, output in outputs.items():
            prepare(split, output, given[split], args.template)
    except DataError as error:
        sys.exit(f"verl_ext: {error}")


if __name__ == "__main__":
    main()
