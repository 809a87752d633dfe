"""A small file in the published schema, made up."""

import pytest

from tests.unit.data.data_files import published, write_rows


@pytest.fixture
def source(tmp_path):
    """Four good prompts, one with two answers, one without any, one with an answer in a part of its copies."""
    rows = []
    for copy in range(5):
        rows += [published(f"What is {i} + 1?", str(i + 1), seed=10 * i + copy) for i in range(4)]
        rows.append(published("Which of two?", "1" if copy != 3 else "2"))
        rows.append(published("Who knows?", [None, "", "  ", "", None][copy]))
        rows.append(published("Sometimes?", "7" if copy > 2 else ""))
    return write_rows(tmp_path / "published.parquet", rows, row_group_size=8)
