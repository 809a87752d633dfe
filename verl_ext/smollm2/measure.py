"""How often a policy is right on held-out sums, computed and not sampled, in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_ext.smollm2.sums import answer_text

BATCH = 64


@torch.no_grad()
def success(folder: Path, prompts_file: Path) -> np.ndarray:
    """(prompts,): probability at temperature 1 of the right answer, written as in the examples and ended by its line.

    It is the product of its tokens' probabilities. What a rollout can also be right with (another end, no blank in
    front) is not counted: a policy is right at least that often.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    table = pq.read_table(prompts_file).to_pylist()
    found = []
    for start in range(0, len(table), BATCH):
        part = table[start : start + BATCH]
        prompts = [tokenizer(row["prompt"][0]["content"])["input_ids"] for row in part]
        answers = [tokenizer(answer_text(row["reward_model"]["ground_truth"]))["input_ids"] for row in part]
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        # Padded behind the answer, where nothing that counts looks.
        longest = max(map(len, whole))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in whole])
        first = min(map(len, prompts)) - 1
        log_p = model(ids, logits_to_keep=longest - first).logits.log_softmax(-1)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            at = torch.arange(len(answer)) + len(prompt) - 1 - first
            found.append(log_p[i, at, torch.tensor(answer)].double().sum().exp().item())
    return np.array(found)
