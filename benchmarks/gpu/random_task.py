"""A policy with random weights and prompts of every success rate: what a large model costs, without its weights.

Answers end at random, so that their lengths are geometric with a mean of `VOCABULARY` tokens, cut at the length limit.
Whether an answer is right is drawn by a hash of its text, with the prompt's own success rate.
"""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

VOCABULARY = 2048
SIZES = {".5B": (896, 4864, 24, 14, 2), "1.5B": (1536, 8960, 28, 12, 2), "tiny": (64, 128, 2, 4, 2)}
"""Width, width of the feed-forward layers, layers, query heads and key heads: Qwen2.5's, but for the embedding."""
PROMPTS = 512
HOPELESS, SOLVED = 0.3, 0.3


def write(folder: Path, size: str) -> tuple[Path, Path]:
    """The model's folder and the file of prompts; written where they are not there yet."""
    model, data = folder / f"random-{size}", folder / "prompts.parquet"
    if not (model / "config.json").exists():
        _write_model(model, size)
    if not data.exists():
        _write_prompts(data)
    return model, data


def _write_model(folder: Path, size: str) -> None:
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from verl_ext.tiny.tokenizer import END_ID, PAD_ID, make_tokenizer

    torch.manual_seed(0)
    width, inner, layers, heads, key_heads = SIZES[size]
    ends = {"bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=8192,
        tie_word_embeddings=True, dtype="bfloat16", **ends,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).bfloat16()
    model.generation_config = GenerationConfig(**ends)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), VOCABULARY)])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_prompts(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, rows = random.Random(0), []
    for number in range(PROMPTS):
        luck = draw.random()
        rate = 0.0 if luck < HOPELESS else 1.0 if luck > 1 - SOLVED else draw.random()
        rows.append({
            "data_source": "random_task",
            "prompt": [{"role": "user", "content": f"prompt {number:03d}"}],
            "reward_model": {"style": "rule", "ground_truth": json.dumps([number, round(rate, 4)])},
            "extra_info": {"index": number},
        })  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), path)


def compute_score(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> dict[str, Any]:
    """The reward: right with the prompt's success rate, always the same for the same answer."""
    number, rate = json.loads(ground_truth)
    right = zlib.crc32(f"{number} {solution_str}".encode()) / 2**32 < rate
    return {"score": float(right), "acc": right}
