"""The tiny policy: a Qwen2 of half a million parameters, and its pre-training on the sloppy adder's answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from verl_ext.tiny.chain_sums import draw_pretraining_pair
from verl_ext.tiny.task_settings import PolicySettings
from verl_ext.tiny.tokenizer import END_ID, PAD_ID

_NO_LABEL = -100


def make_policy(settings: PolicySettings) -> Qwen2ForCausalLM:
    """The untrained model, float32, on the CPU. Draws its weights from torch's global generator."""
    config = Qwen2Config(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        max_position_embeddings=settings.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=True, temperature=1.0, top_p=1.0, top_k=0
    )
    return model


def encode_pairs(pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of prompt + answer + end token, padded on the right.

    The labels cover the answer and the end token only. Padding on the right needs no attention mask: the attention is
    causal, so no labelled position sees it.

    Returns:
        (ids, labels), each of shape (pairs, longest), int64.
    """
    rows = [[*prompt.encode(), *answer.encode(), END_ID] for prompt, answer in pairs]
    ids = torch.full((len(rows), max(map(len, rows))), PAD_ID)
    labels = torch.full_like(ids, _NO_LABEL)
    for i, (row, (prompt, _)) in enumerate(zip(rows, pairs, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, len(prompt) : len(row)] = ids[i, len(prompt) : len(row)]
    return ids, labels


def learning_rate_factor(step: int, settings: PolicySettings) -> float:
    """Linear warm-up to 1, then linear to 0 at `settings.steps`. `step` counts from 0."""
    warmup = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    decay = (settings.steps - step) / max(1, settings.steps - settings.warmup_steps)
    return min(warmup, decay)


@contextmanager
def _own_torch_state(seed: int) -> Iterator[None]:
    """A seed of our own and one thread an operation; the caller's generator and threads are as before afterwards."""
    threads_before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads_before)


def _shard_gradient(
    model: Qwen2ForCausalLM, pairs: list[tuple[str, str]], labelled: int
) -> tuple[float, tuple[torch.Tensor, ...]]:
    """A shard's part of the batch's mean loss, and its gradient. `labelled`: answer tokens of the whole batch."""
    ids, labels = encode_pairs(pairs)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    targets = labels[:, 1:]
    on_answer = targets != _NO_LABEL
    loss = torch.nn.functional.cross_entropy(logits[on_answer], targets[on_answer], reduction="sum") / labelled
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def pretrain(settings: PolicySettings, progress: Callable[[int, float], None] | None = None) -> Qwen2ForCausalLM:
    """Train a policy from nothing on the sloppy adder's answers.

    Mean cross-entropy over answer tokens, AdamW without weight decay, clipped gradients. A batch is cut into shards of
    similar length (less padding), which a few threads work on, each operation on one thread: far faster than threads
    inside operations wherever another program wants the cores too, and the result does not depend on the number of
    threads. The same settings give the same weights on the same machine and build of torch.

    Args:
        settings: sizes, corpus and optimizer.
        progress: called as progress(step, loss) every 100 steps.
    """
    rng = Random(f"chain_sums pre-training {settings.seed}")
    with (
        _own_torch_state(settings.seed),
        ThreadPoolExecutor(settings.threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        model = make_policy(settings).train()
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(
            parameters,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=0.0,
            fused=True,
        )
        for step in range(settings.steps):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * learning_rate_factor(step, settings)
            pairs = [draw_pretraining_pair(settings, rng) for _ in range(settings.batch_size)]
            pairs.sort(key=lambda pair: -len(pair[0]))  # the longest shard first: the threads end together
            labelled = sum(len(answer) + 1 for _, answer in pairs)
            size = -(-len(pairs) // settings.shards)
            shards = [pairs[start : start + size] for start in range(0, len(pairs), size)]
            parts = list(pool.map(lambda shard, n=labelled: _shard_gradient(model, shard, n), shards))
            for parameter, *gradients in zip(parameters, *(gradient for _, gradient in parts), strict=True):
                parameter.grad = torch.stack(gradients).sum(0)
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
            optimizer.step()
            if progress is not None and (step + 1) % 100 == 0:
                progress(step + 1, sum(loss for loss, _ in parts))
        return model.eval()


def timed_progress(steps: int) -> Callable[[int, float], None]:
    """A progress callback that rewrites one line of the terminal."""
    start = time.monotonic()

    def show(step: int, loss: float) -> None:
        print(f"\r  step {step}/{steps}, loss {loss:.3f}, {time.monotonic() - start:.0f} s", end="", flush=True)

    return show
