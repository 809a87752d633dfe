"""Rows of the tiny task, and a check of data sets made of them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from tests.unit.checks.check_configs import config_with
from verl_ext.checks import Checks
from verl_ext.checks.data import check_data
from verl_ext.tiny.chain_sums import verl_row


def rows(n=40, first=0):
    return [verl_row([i // 10, i % 10, 1], i, "train") for i in range(first, first + n)]


def without(column, n=40):
    return [{name: value for name, value in row.items() if name != column} for row in rows(n)]


def changed(number, **values):
    given = rows()
    given[number] = given[number] | values
    return given


def checked(tmp_path, given, setting="data.train_files", suffix="parquet", **values):
    """(checks, rows read) of a data set."""
    path = tmp_path / f"set.{suffix}"
    if suffix == "parquet":
        schema = pa.Table.from_pylist(rows(1)).schema if not given else None
        pq.write_table(pa.Table.from_pylist(given, schema=schema), path)
    elif suffix == "json":
        path.write_text(json.dumps(given))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
    config = config_with(**{setting: str(path), **values})
    checks = Checks()
    return checks, checks.run("data", check_data, config, setting)
