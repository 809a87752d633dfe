"""DAPO-Math-17K's preparation on a file of the published shape: seconds, and the most memory the process ever held.

The limit is by the clock; on a busy machine the CPU seconds beside it say more.

``make bench-data`` generates 1,791,700 rows (17,917 prompts, 100 copies of each in random order, UUIDs as index, text
of random words), runs ``verl_ext.data.dapo_math_17k`` on them in a process of its own, checks the result
against what was generated, and writes ``benchmarks/results/data.json``. No real data is used.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.result_files import write_result
from verl_ext.data.templates import ask

RESULTS = Path(__file__).parent / "results" / "data.json"
PROMPTS, COPIES = 17_917, 100
CONFLICTING, EMPTY = 40, 20
SECONDS, GIB = 60, 2


def generate(path: Path) -> None:
    """The published columns; the first prompts give two answers or none. Written as pandas and Arrow do by default."""
    rng = np.random.default_rng(0)
    words = np.array(["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(4000)])
    questions = [" ".join(words[rng.integers(0, len(words), rng.integers(20, 90))]) for _ in range(PROMPTS)]
    contents = pa.array([ask(question, "dapo")[0]["content"] for question in questions])
    answers = np.array([str(number) for number in rng.integers(0, 1000, PROMPTS)], dtype=object)
    answers[CONFLICTING : CONFLICTING + EMPTY] = ""
    indices = pa.array([str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(PROMPTS)])
    order = rng.permutation(np.repeat(np.arange(PROMPTS, dtype=np.int32), COPIES))
    schema = pa.schema([
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.string())])),
    ])  # fmt: skip
    odd = set(range(CONFLICTING))

    def batches(size=1 << 16):
        for start in range(0, len(order), size):
            part = order[start : start + size]
            n = len(part)
            given = answers[part].copy()
            for place, prompt in enumerate(part.tolist()):
                if prompt in odd:
                    odd.discard(prompt)
                    given[place] = "another"
            messages = pa.StructArray.from_arrays([contents.take(pa.array(part)), pa.array(["user"] * n)],
                                                  fields=list(schema.field("prompt").type.value_type))  # fmt: skip
            yield pa.RecordBatch.from_arrays([
                pa.array(["math_dapo"] * n),
                pa.ListArray.from_arrays(pa.array(np.arange(n + 1, dtype=np.int32)), messages),
                pa.array(["MATH"] * n),
                pa.StructArray.from_arrays([pa.array(given, pa.string()), pa.array(["rule-lighteval/MATH_v2"] * n)],
                                           fields=list(schema.field("reward_model").type)),
                pa.StructArray.from_arrays([indices.take(pa.array(part))],
                                           fields=list(schema.field("extra_info").type)),
            ], schema=schema)  # fmt: skip

    # One row group of up to 1,048,576 rows, Arrow's default: the largest that has to be streamed.
    table = pa.Table.from_batches(batches(), schema)
    pq.write_table(table, path)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "source.parquet", Path(folder) / "dapo_math_17k.parquet"
        subprocess.run([sys.executable, "-m", "benchmarks.bench_data", "--generate", str(source)], check=True)
        file = pq.ParquetFile(source).metadata
        print(f"generated {file.num_rows:,} rows in {file.num_row_groups} row groups, "
              f"{source.stat().st_size / 2**20:.0f} MiB")  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.bench_data", "--run", "--input", source, "--output", output]
        before, start = os.times(), time.monotonic()
        # A process of its own, so that the memory of generating is not counted.
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        seconds, after = time.monotonic() - start, os.times()
        load = os.getloadavg()[0]
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        print(said, end="")
        start = time.monotonic()
        subprocess.run(command, check=True)
        again = time.monotonic() - start
        counts = json.loads(output.with_name("dapo_math_17k.report.json").read_text())["counts"]
        wanted = {"rows": PROMPTS * COPIES, "prompts": PROMPTS, "kept": PROMPTS - CONFLICTING - EMPTY,
                  "conflicting": CONFLICTING, "empty": EMPTY}  # fmt: skip
        assert all(counts[name] == value for name, value in wanted.items()), (counts, wanted)
    gib = int(said.split()[-2]) / 2**20
    rows = [
        ("CPU seconds, 1,791,700 rows", cpu, "s", None),
        ("seconds by the clock", seconds, "s", SECONDS),
        ("processes waiting for a core meanwhile (load average)", load, "", None),
        ("most memory held (resident)", gib, "GiB", GIB),
        ("seconds where the output is there already", again, "s", None),
    ]
    for name, value, unit, limit in rows:
        over = "" if limit is None or value <= limit else "  OVER"
        print(f"{name:54}  {value:8.3g}  {'' if limit is None else limit:>4} {unit}{over}")
    write_result(
        RESULTS,
        {
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
            "machine": platform.machine(),
            "counts": counts,
            "results": [dict(zip(("name", "value", "unit", "limit"), row, strict=True)) for row in rows],
        },
    )
    return int(any(limit is not None and value > limit for _, value, _, limit in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--generate"]:
        generate(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--run"]:
        from verl_ext.data.dapo_math_17k import main as prepare

        prepare(sys.argv[2:])
        print(f"Most memory held: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss} KiB")
    else:
        sys.exit(main())
