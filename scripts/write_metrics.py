# SPDX-License-Identifier: Apache-2.0
"""`python -m scripts.write_metrics`: writes docs/metrics.md, every `allocation/...` metric, from where it is declared.

Run it in the repository. With --check it writes nothing, and its exit status is 1 where the document is stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from verl_ext.allocation import conclude
from verl_ext.allocation.metric import Metric
from verl_ext.allocation.prompt_pool import PromptPool
from verl_ext.allocation.registry import allocators, selectors
from verl_ext.training import metrics as training

DOCUMENT = Path("docs", "metrics.md")
HEAD = """\
# Metrics

Written by `python -m scripts.write_metrics` from where each is declared; not to be edited by hand. All are logged under
`allocation/` at every step, beside verl's own. Counts are of the step unless the meaning says otherwise.
"""


def sections() -> dict[str, Mapping[str, Metric]]:
    """Heading -> metrics by name, below `allocation/`."""
    found: dict[str, Mapping[str, Metric]] = {
        "A step's batch, and its rollouts": conclude.METRICS,
        "What goes on over the update": conclude.ASYNC_METRICS,
        "The pool of prompts": PromptPool.METRICS,
        "The update": training.METRICS,
    }
    # A subclass logs what its base does.
    for what, registry, prefix in (("Selector", selectors, "selector/"), ("Allocator", allocators, "")):
        names: dict[int, list[str]] = {}
        rules = {name: registry.get(name) for name in registry.names()}
        tables = {name: rule.METRICS for name, rule in rules.items() if rule.__module__.startswith("verl_ext.")}
        for name, table in tables.items():
            if table:
                names.setdefault(id(table), []).append(name)
        for group in names.values():
            title = f"{what} {' and '.join(f'`{name}`' for name in group)}"
            found[title] = {prefix + name: metric for name, metric in tables[group[0]].items()}
    return found


def is_described(name: str) -> bool:
    """Whether a metric of the log, `allocation/...`, is in the document."""
    own = name.removeprefix("allocation/")
    return any(fnmatchcase(own, known) for table in sections().values() for known in table)


def document() -> str:
    """docs/metrics.md as it should be."""
    lines = [HEAD]
    for title, table in sections().items():
        lines += [f"## {title}", "", "| metric | meaning | unit | good and bad values |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {m.meaning} | {m.unit} | {m.reading} |" for name, m in table.items()]
        lines.append("")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser("python -m scripts.write_metrics", description=f"Writes {DOCUMENT}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the document is stale")
    args = parser.parse_args(argv)
    text = document()
    if args.check:
        fresh = DOCUMENT.is_file() and DOCUMENT.read_text(encoding="utf-8") == text
        print(f"{DOCUMENT} is {'as it should be' if fresh else 'stale: run python -m scripts.write_metrics'}")
        return 0 if fresh else 1
    DOCUMENT.write_text(text, encoding="utf-8")
    print(f"wrote {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
