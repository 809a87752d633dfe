"""Input files from the hub or from disk, and an output that is whole or absent.

An output `NAME.parquet` comes with `NAME.dropped.jsonl` and, written last, `NAME.report.json`: what it was made from,
its counts, and the true answers that the reward cannot judge. All three are written beside their places and renamed, so
that what was cut off is never taken for done.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.data.rows import SCHEMA, DataError
from verl_ext.data.truths import check_truths, describe

# Raised when what is made of the same input changes.
FORMAT = 2


def data_folder() -> Path:
    """$VERL_EXT_DATA, or else ~/data/verl_ext; the recipes look for their files there."""
    return Path(os.environ.get("VERL_EXT_DATA") or "~/data/verl_ext").expanduser()


def download(repo: str, patterns: list[str], revision: str | None = None) -> list[Path]:
    """Files of a data set on the hub, kept in the hub client's cache; a download that was cut off goes on.

    Raises:
        DataError: the hub cannot be reached, or has no such files.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise DataError(
            f"hub data set {repo}",
            f"cannot be downloaded ({type(error).__name__}: {error}). Without a hub, copy its files here and name them "
            "with --input",
        ) from error
    files = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    if not files:
        raise DataError(f"hub data set {repo}", f"no file like {' or '.join(patterns)}")
    return files


def local_files(paths: Iterable[str | os.PathLike]) -> list[Path]:
    """The files named: each a file, or a folder of them.

    Raises:
        DataError: a path does not exist, has another ending, or a folder has no data.
    """
    files: list[Path] = []
    for path in (Path(p).expanduser() for p in paths):
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in (".parquet", ".jsonl") and p.is_file())
            if not found:
                raise DataError(path, "the folder has no *.parquet or *.jsonl file")
            files += found
        elif not path.is_file():
            raise DataError(path, "does not exist")
        elif path.suffix not in (".parquet", ".jsonl"):
            raise DataError(path, f"ends in {path.suffix!r}; accepted are .parquet and .jsonl")
        else:
            files.append(path)
    return files


def check_output(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that would overwrite an input.

    Raises:
        DataError: the output, or a file written beside it, is one of the inputs, or a folder.
    """
    read = {path.resolve() for path in inputs}
    for path in (output, *(_beside(output, ending) for ending in (".dropped.jsonl", ".report.json"))):
        if os.path.isdir(path):
            raise DataError(path, "is a folder where a file is to be written; another output is accepted")
        if path.resolve() in read:
            raise DataError(path, "would be written over while it is an input; another output is accepted")


def open_parquet(path: Path) -> pq.ParquetFile:
    """A Parquet file that is read in a stream: pages, not whole columns, are held in memory.

    Raises:
        DataError: the file is not Parquet, or was cut off.
    """
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(path, f"is not a whole Parquet file ({error})") from error


def fingerprint(path: Path) -> dict[str, Any]:
    """Name, size and a digest of the last 64 KiB: the footer of a Parquet file, with its counts and statistics."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - (1 << 16)))
        digest = hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    return {"name": path.name, "bytes": size, "digest": digest}


def finished(output: Path, made_from: Mapping[str, Any]) -> dict[str, Any] | None:
    """The report of a finished output made from the same inputs; None if it has to be made."""
    report_path = _beside(output, ".report.json")
    try:
        report = json.loads(report_path.read_text("utf-8"))
        size = output.stat().st_size
    # ValueError: neither JSON nor UTF-8.
    except (OSError, ValueError):
        return None
    if not isinstance(report, dict):
        return None
    same = report.get("format") == FORMAT and report.get("made_from") == made_from
    whole = output.is_file() and size == report.get("bytes")
    return report if same and whole else None


def write(
    output: Path,
    made_from: Mapping[str, Any],
    batches: Iterable[list[dict[str, Any]]],
    dropped: Iterable[Mapping[str, Any]],
    counts: Mapping[str, Any],
    mathematics: bool = True,
) -> dict[str, Any]:
    """Write an output, its list of dropped prompts and its report; read the output back and check it.

    Args:
        output: the Parquet file; its folder is made.
        made_from: what decides the content; a later run with the same finds the output done.
        batches: rows under `SCHEMA`, some at a time.
        dropped: a line each.
        counts: for the report; `kept` must be the number of rows.
        mathematics: the rows are for the mathematics reward, which tries their true answers.

    Raises:
        AssertionError: rows or keys read back are not those counted.
        DataError: the files cannot be written.
    """
    with _os_errors_named(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        report_path = _beside(output, ".report.json")
        # From here on there is no finished output under this name.
        report_path.unlink(missing_ok=True)
        truths: list[str] = []
        with _renamed(output) as temporary:
            with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
                for rows in batches:
                    truths += [row["reward_model"]["ground_truth"] for row in rows]
                    if rows:
                        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
            _check(temporary, counts["kept"])
        with _renamed(_beside(output, ".dropped.jsonl")) as temporary:
            temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in dropped), "utf-8")
        report = {"format": FORMAT, "made_from": made_from, "bytes": output.stat().st_size, "counts": counts}
        if mathematics:
            report["truths"] = check_truths(truths)
            print(describe(report["truths"]), flush=True)
        with _renamed(report_path) as temporary:
            temporary.write_text(json.dumps(report, indent=1) + "\n")
        return report


def _check(path: Path, kept: int) -> None:
    keys: set[str] = set()
    rows = 0
    for batch in pq.ParquetFile(path).iter_batches(columns=["extra_info.key"]):
        keys.update(batch.column(0).field("key").to_pylist())
        rows += batch.num_rows
    if not rows == len(keys) == kept:
        raise AssertionError(f"{path}: {rows} rows with {len(keys)} different keys where {kept} prompts were kept")


def _beside(output: Path, ending: str) -> Path:
    return output.with_name(output.stem + ending)


@contextmanager
def _os_errors_named(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            output, f"cannot be written ({type(error).__name__}: {error}); a file in a folder that can be written to "
            "is accepted"
        ) from error  # fmt: skip


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """Give a temporary file beside `path`; it is renamed to `path` on success and removed on an error."""
    _remove_abandoned(path)
    # Not mkstemp's, which is private: the umask says who may read what it becomes.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        # The lock ends with the process however that ends: a temporary file without one is abandoned.
        with temporary.open("xb") as held:
            _lock(held)
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files for `path` of processes that were killed; those of living ones are left."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{32}}\.tmp")
    for other in path.parent.iterdir():
        if name.fullmatch(other.name):
            # One that is gone by now, or is another user's, is none of this run's.
            with suppress(OSError), other.open("rb") as file:
                if _lock(file):
                    other.unlink()


def _lock(file: IO[bytes]) -> bool:
    """Try to lock a file; False if another process holds the lock or the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
