"""Where the tiny policy and its data lie; what is not there is made once and kept in a cache.

The policy of the default settings is part of the package (`policy_seed0/`), so that every machine starts from the same
one. Below the cache's root stand `policy-<hash>/` (a Hugging Face folder, for any other settings) and
`data-<mix>-<hash>/` (train.parquet and val.parquet), each named by a hash of the settings it depends on. A folder
appears whole or not at all, so one that is there can be used.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from verl_ext.tiny.task_settings import PolicySettings, TinySettings, data_key, policy_key

SHIPPED = Path(__file__).with_name("policy_seed0")
"""Folder of the policy that comes with the package: that of `PolicySettings()`."""


@dataclass(frozen=True)
class TinyPaths:
    """Where the finished parts lie."""

    model: Path
    """Hugging Face folder of the pre-trained policy: loads with AutoModelForCausalLM, AutoTokenizer and vLLM."""
    train: Path
    """Parquet file of RL prompts, in verl's format."""
    val: Path
    """Parquet file of held-out prompts, in verl's format."""


def default_cache() -> Path:
    """$VERL_EXT_CACHE, or else ~/.cache/verl_ext."""
    return Path(os.environ.get("VERL_EXT_CACHE") or "~/.cache/verl_ext").expanduser()


def ensure_tiny(mix: str = "balanced", cache: str | os.PathLike | None = None, policy_seed: int = 0) -> TinyPaths:
    """The tiny policy and the data of a mix; what is not there yet is made.

    Args:
        mix: "balanced" or "sparse" (see verl_ext.tiny.task_settings.MIXES).
        cache: folder to keep them in; None is `default_cache()`.
        policy_seed: seed of the pre-training. 0 is the policy that comes with the package; another one is pre-trained
            on first use, in a few minutes.

    Raises:
        SettingError: the mix is not known, or the seed is no integer of at least 0.
    """
    settings = TinySettings(mix=mix, policy=PolicySettings(seed=policy_seed))
    return prepare(default_cache() if cache is None else cache, settings)


def prepare(out_dir: str | os.PathLike, settings: TinySettings) -> TinyPaths:
    """Make what is missing below `out_dir` for these settings, and say where everything lies.

    Safe to call from several processes at once: one works, the others wait for it.
    """
    paths = locate(out_dir, settings)
    paths.train.parent.parent.mkdir(parents=True, exist_ok=True)
    made = make_once(paths.train.parent, lambda folder: _write_data(folder, settings))
    if paths.model != SHIPPED:
        made = make_once(paths.model, lambda folder: write_policy(folder, settings.policy)) or made
    if not made:
        print(f"Tiny task: policy and data found: {paths.model}, {paths.train.parent}", flush=True)
    return paths


def locate(out_dir: str | os.PathLike, settings: TinySettings) -> TinyPaths:
    """Where `prepare` puts everything for these settings; makes nothing."""
    root = Path(out_dir).expanduser().resolve()
    label = settings.mix if settings.shares is None else "custom"
    data = root / f"data-{label}-{data_key(settings)}"
    key = policy_key(settings.policy)
    return TinyPaths(
        model=SHIPPED if key == policy_key(PolicySettings()) else root / f"policy-{key}",
        train=data / "train.parquet",
        val=data / "val.parquet",
    )


def tiny_paths(mix: str = "balanced", cache: str | os.PathLike | None = None) -> TinyPaths:
    """Where `ensure_tiny` puts everything; makes nothing, so that a configuration can name the paths."""
    return locate(default_cache() if cache is None else cache, TinySettings(mix=mix))


def make_once(folder: Path, write: Callable[[Path], None]) -> bool:
    """Let `write` fill a folder beside the target and rename it into place; True if that was needed."""
    if folder.is_dir():
        return False
    with _locked(folder.with_name(f".{folder.name}.lock")) as alone:
        if folder.is_dir():  # another process made it while this one waited
            return False
        if alone:
            for left_over in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
        # Not mkdtemp's, whose folders are private: this one is renamed, and the umask says who may read it.
        temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
        temporary.mkdir(mode=0o775)
        try:
            write(temporary)
            try:
                temporary.rename(folder)
            except OSError as error:  # only where locks do not work: another process was faster with the same content
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return True


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Wait for the lock and hold it; yields False where the file system has no locks."""
    alone = True
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems: the rename stays atomic, so work is only done twice
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            alone = False
        yield alone


def write_policy(folder: Path, settings: PolicySettings) -> None:
    """Pre-train a policy and write it as a Hugging Face folder.

    The weights are written in bf16, which halves the file; config.json says float32, so that they are loaded as such.
    """
    from safetensors.torch import load_file, save

    from verl_ext.tiny.policy import pretrain, timed_progress  # torch: only where it is needed
    from verl_ext.tiny.tokenizer import make_tokenizer

    print(
        f"Tiny task: pre-training a {settings.num_layers}-layer Qwen2 on a sloppy adder's sums, {settings.steps} steps "
        f"of {settings.batch_size} (2 to 3 minutes on 2 idle cores)",
        flush=True,
    )
    start = time.monotonic()
    pretrain(settings, timed_progress(settings.steps)).save_pretrained(folder)
    weights = folder / "model.safetensors"
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    weights.write_bytes(save(rounded, {"format": "pt"}))
    make_tokenizer().save_pretrained(folder)
    (folder / "tiny_settings.json").write_text(json.dumps(dataclasses.asdict(settings), indent=2) + "\n")
    print(f"\nTiny task: policy ready after {time.monotonic() - start:.0f} s", flush=True)


def _write_data(folder: Path, settings: TinySettings) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl_ext.tiny.chain_sums import draw_prompts, verl_row

    start = time.monotonic()
    sizes = {"train": settings.train_size, "val": settings.val_size}
    for split, size in sizes.items():
        prompts = draw_prompts(size, settings.difficulty_shares, split == "val", settings.policy, settings.seed)
        rows = [verl_row(digits, index, split) for index, digits in enumerate(prompts)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    (folder / "tiny_settings.json").write_text(json.dumps(dataclasses.asdict(settings), indent=2) + "\n")
    print(
        f"Tiny task: wrote {settings.train_size} training and {settings.val_size} held-out prompts in "
        f"{time.monotonic() - start:.1f} s",
        flush=True,
    )
