"""The policy of the laboratory: the Qwen2 architecture in plain PyTorch, run on trees of tokens.

A group's rollouts share their prompt and often a part of their answers. Laid out as a tree, every token that they share
is computed once, forward and backward; a token attends to itself and to its ancestors. Linear layers run on the tokens
of all trees side by side, so that nothing is padded but the attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DecoderSettings:
    """Sizes of the policy, by the names of a Qwen2 configuration."""

    vocab_size: int = 264
    """Rows of the embedding: 256 bytes, 3 special tokens, padded to a multiple of 8."""
    hidden_size: int = 128
    """Width of the residual stream."""
    intermediate_size: int = 512
    """Width of the feed-forward layers."""
    num_hidden_layers: int = 2
    """Transformer layers."""
    num_attention_heads: int = 4
    """Query heads."""
    num_key_value_heads: int = 2
    """Key-value heads."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in a norm."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DecoderSettings:
        """Read the sizes from a Hugging Face ``config.json``."""
        rope = config.get("rope_parameters") or {}
        known = {f.name: config[f.name] for f in fields(cls) if config.get(f.name) is not None}
        return cls(**{"rope_theta": rope.get("rope_theta", cls.rope_theta), **known})


class Forest:
    """Trees of tokens, one a group: a prompt, and below its last token the answers as a trie.

    Attributes (tokens of all trees side by side, T in all; trees G; L the longest):
        ids, positions: (T,), token and depth in its tree.
        slot: (T,), place in the padded layout, tree x L + place in the tree.
        mask: (G, 1, L, L), True where a token (row) attends to another (column).
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._parents: list[int] = []
        self._starts: list[int] = []

    def add_tree(self, prompt: Sequence[int]) -> int:
        """Start a tree; returns the node of the prompt's last token."""
        start = len(self._ids)
        self._starts.append(start)
        self._ids += prompt
        self._positions += range(len(prompt))
        self._parents += [-1, *range(start, start + len(prompt) - 1)]
        self._children: dict[tuple[int, int], int] = {}
        return len(self._ids) - 1

    def add_path(self, node: int, tokens: Sequence[int]) -> list[int]:
        """The nodes that predict ``tokens`` below a node of the last tree: itself, and one for all but the last."""
        path = [node]
        for token in tokens[:-1]:
            key = (node, token)
            child = self._children.get(key)
            if child is None:
                child = self._children[key] = len(self._ids)
                self._ids.append(token)
                self._positions.append(self._positions[node] + 1)
                self._parents.append(node)
            node = child
            path.append(node)
        return path

    def plant(self, device: str | torch.device = "cpu") -> Forest:
        """Make the arrays; nothing is added afterwards."""
        total = len(self._ids)
        starts = np.array([*self._starts, total])
        sizes = np.diff(starts)
        longest = int(sizes.max())
        tree = np.repeat(np.arange(len(sizes)), sizes)
        place = np.arange(total) - starts[tree]
        attends = np.zeros((len(sizes), longest, longest), bool)
        attends[:, np.arange(longest), np.arange(longest)] = True
        parents = np.array(self._parents)
        local = parents - starts[tree]
        depth = np.array(self._positions)
        for level in range(1, int(depth.max()) + 1):  # ancestors of a level from those of the level above
            rows = np.flatnonzero(depth == level)
            attends[tree[rows], place[rows]] |= attends[tree[rows], local[rows]]
        self.ids = torch.tensor(self._ids, device=device)
        self.positions = torch.tensor(self._positions, device=device)
        self.slot = torch.tensor(tree * longest + place, device=device)
        self.mask = torch.from_numpy(attends).to(device)[:, None]
        self.shape = (len(sizes), longest)
        return self


class Attention(nn.Module):
    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        self.heads, self.kv = s.num_attention_heads, s.num_key_value_heads
        self.size = s.hidden_size // s.num_attention_heads
        self.q_proj = nn.Linear(s.hidden_size, self.heads * self.size)
        self.k_proj = nn.Linear(s.hidden_size, self.kv * self.size)
        self.v_proj = nn.Linear(s.hidden_size, self.kv * self.size)
        self.o_proj = nn.Linear(self.heads * self.size, s.hidden_size, bias=False)

    def qkv(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries (T, heads, size), rotated; keys, rotated, and values (T, kv heads, size)."""
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        bias = torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias])
        both = F.linear(x, weight, bias).view(len(x), -1, self.size)
        turned, v = both[:, : self.heads + self.kv], both[:, self.heads + self.kv :]
        half = self.size // 2
        cos, sin = cos[:, None], sin[:, None]
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return turned[:, : self.heads], turned[:, self.heads :], v


class Layer(nn.Module):
    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.input_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(s.hidden_size, s.intermediate_size, bias=False),
                "up_proj": nn.Linear(s.hidden_size, s.intermediate_size, bias=False),
                "down_proj": nn.Linear(s.intermediate_size, s.hidden_size, bias=False),
            }
        )

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        h = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))


class Decoder(nn.Module):
    """Loads the state dict of a Hugging Face Qwen2ForCausalLM with tied embeddings, and gives the same logits."""

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self.settings = settings
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(settings.vocab_size, settings.hidden_size)
        self.model.layers = nn.ModuleList(Layer(settings) for _ in range(settings.num_hidden_layers))
        self.model.norm = nn.RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        size = settings.hidden_size // settings.num_attention_heads
        self._frequencies = settings.rope_theta ** (-torch.arange(0, size, 2).double() / size)

    def load_qwen2(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over the weights of a Qwen2ForCausalLM."""
        self.load_state_dict({k: v.float() for k, v in state.items() if k != "lm_head.weight"})

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the rotary angles, (T, size / 2) each."""
        angle = positions.cpu().double()[:, None] * self._frequencies
        return angle.cos().float().to(positions.device), angle.sin().float().to(positions.device)

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of every token, (rows, vocabulary), from final hidden states (rows, width)."""
        return F.linear(hidden, self.model.embed_tokens.weight).log_softmax(-1)

    def forward(self, forest: Forest, keep: list | None = None) -> torch.Tensor:
        """Final hidden states of all tokens of a forest, (T, width).

        Args:
            keep: gets each layer's keys and values, (T, kv heads, size) each.
        """
        trees, longest = forest.shape
        cos, sin = self.angles(forest.positions)
        x = self.model.embed_tokens(forest.ids)
        total = len(x)
        back = torch.full((trees * longest,), total, device=x.device)
        back[forest.slot] = torch.arange(total, device=x.device)

        def padded(t: torch.Tensor) -> torch.Tensor:  # (T, heads, size) -> (trees, heads, longest, size)
            t = torch.cat([t, t.new_zeros(1, *t.shape[1:])])[back]
            return t.view(trees, longest, *t.shape[1:]).transpose(1, 2)

        for layer in self.model.layers:
            attention = layer.self_attn
            q, k, v = attention.qkv(layer.input_layernorm(x), cos, sin)
            if keep is not None:
                keep.append((k, v))
            out = F.scaled_dot_product_attention(
                padded(q), padded(k), padded(v), attn_mask=forest.mask, enable_gqa=True
            )
            out = out.transpose(1, 2).reshape(trees * longest, -1)[forest.slot]
            x = layer.feed(x + attention.o_proj(out))
        return self.model.norm(x)

    def extend(
        self, tokens: torch.Tensor, positions: torch.Tensor, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Final hidden states of one more token a sequence, whose keys and values are written into the caches.

        Args:
            tokens, positions: (N,).
            caches: by layer, keys and values of (N, longest, kv heads, size), filled below ``positions``.
        """
        cos, sin = self.angles(positions)
        x = self.model.embed_tokens(tokens)
        rows = torch.arange(len(x), device=x.device)
        longest = int(positions.max()) + 1
        seen = (torch.arange(longest, device=x.device) <= positions[:, None])[:, None, None]
        for layer, (keys, values) in zip(self.model.layers, caches, strict=True):
            attention = layer.self_attn
            q, k, v = attention.qkv(layer.input_layernorm(x), cos, sin)
            keys[rows, positions], values[rows, positions] = k, v
            out = F.scaled_dot_product_attention(
                q[:, :, None], keys[:, :longest].transpose(1, 2), values[:, :longest].transpose(1, 2),
                attn_mask=seen, enable_gqa=True,
            )  # fmt: skip
            x = layer.feed(x + attention.o_proj(out.reshape(len(x), -1)))
        return self.model.norm(x)
