"""Small files in the published schemas, made up."""

import json
import uuid

import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.data.templates import ask

# DAPO-Math-17K's and AIME-2024's columns, in the published order of fields.
PUBLISHED = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.string())])),
    ]
)


def published(question, answer, seed=0, **other):
    """A row as published: a UUID as index, the instructions around the question."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": ask(question, "dapo")[0]["content"], "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(uuid.UUID(int=seed))},
        **other,
    }


def write_rows(path, rows, schema=PUBLISHED, **options):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **options)
    return path


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
