"""The base policies: pre-trained on the spot with different seeds, kept in the cache."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
from itertools import islice
from pathlib import Path

import safetensors.torch
import torch

from verl_ext.files import write_whole
from verl_ext.lab.decoder import Decoder, DecoderSettings, Forest
from verl_ext.lab.tasks import FAMILIES, Family, Task, Tokens, with_end
from verl_ext.tiny.policy_store import default_cache, ensure_tiny


def answer_log_probs(policy: Decoder, pairs: list[tuple[Tokens, Tokens]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens of given answers, end tokens included, and which pair each belongs to."""
    forest = Forest()
    nodes: list[int] = []
    labels: list[int] = []
    owners: list[int] = []
    for i, (prompt, answer) in enumerate(pairs):
        tokens = with_end(answer)
        nodes += forest.add_path(forest.add_tree(prompt), tokens)
        labels += tokens
        owners += [i] * len(tokens)
    device = next(policy.parameters()).device
    hidden = policy(forest.plant(device))[nodes]
    taken = policy.log_probabilities(hidden).gather(1, torch.tensor(labels, device=device)[:, None])[:, 0]
    return taken, torch.tensor(owners, device=device)


@torch.no_grad()
def success_rates(policy: Decoder, pairs: list[tuple[Tokens, Tokens]], batch: int = 128) -> torch.Tensor:
    """Exact probability of the right answer to each prompt at temperature 1; (pairs,), float64, on the CPU."""
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
    rates = torch.empty(len(pairs), dtype=torch.float64)
    for start in range(0, len(order), batch):
        members = order[start : start + batch]
        log_probs, owners = answer_log_probs(policy, [pairs[i] for i in members])
        total = torch.zeros(len(members), dtype=torch.float64).index_add(0, owners.cpu(), log_probs.double().cpu())
        rates[members] = total.exp()
    return rates


def pretrain(family: Family, seed: int, device: str = "cpu") -> Decoder:
    """Train a policy from nothing on the family's corpus: mean cross-entropy over answer tokens, AdamW."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Decoder(family.sizes).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=family.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    corpus = family.pairs(seed)
    for step in range(family.steps):
        rate = min((step + 1) / 30, (family.steps - step) / (family.steps - 30))
        for group in optimizer.param_groups:
            group["lr"] = family.lr * rate
        pairs = sorted(islice(corpus, family.batch), key=lambda pair: len(pair[0]) + len(pair[1]))
        tokens = sum(len(answer) + 1 for _, answer in pairs)
        optimizer.zero_grad()
        for start in range(0, len(pairs), 64):  # parts of similar length: little is padded
            part = [(tuple(p.encode()), tuple(a.encode())) for p, a in pairs[start : start + 64]]
            (-answer_log_probs(policy, part)[0].sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return policy


def policy_path(family: Family, seed: int, cache: Path | None = None) -> Path:
    """Where a base policy is kept, by all that it depends on."""
    content = [family.name, dataclasses.asdict(family.sizes), family.steps, family.batch, family.lr, seed]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
    return (cache or default_cache()) / "lab" / f"{family.name}-{seed}-{key}.safetensors"


def tiny_policy() -> Decoder:
    """The policy of `verl_ext.tiny`, which training through verl's whole stack starts from, too."""
    from safetensors.torch import load_file

    folder = ensure_tiny().model
    policy = Decoder(DecoderSettings.of(json.loads((folder / "config.json").read_text())))
    policy.load_qwen2(load_file(folder / "model.safetensors"))
    return policy


def base_policy(task: Task, seed: int, cache: Path | None = None, device: str = "cpu") -> Decoder:
    """The base policy of a task, made on first use; one process makes it, others wait.

    Policy 0 of the chain sums is the one of `verl_ext.tiny`.
    """
    if task.family is FAMILIES["sums"] and seed == 0:
        return tiny_policy().to(device)
    path = policy_path(task.family, seed, cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            print(
                f"pre-training policy {seed} of the {task.family.name} tasks, once; kept in {path.parent}", flush=True
            )
            weights = pretrain(task.family, seed, device).state_dict()
            write_whole(path, safetensors.torch.save({name: tensor.clone() for name, tensor in weights.items()}))
    with torch.random.fork_rng(devices=[]):
        policy = Decoder(task.family.sizes)
    policy.load_state_dict(safetensors.torch.load_file(path))
    return policy.to(device)
