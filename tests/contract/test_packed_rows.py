"""Rows packed without padding, with PyTorch's own attention: what verl trains on where flash-attn is not installed."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils.experimental.torch_functional import FusedLinearForPPO

LENGTHS = (5, 9, 3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    config._attn_implementation = "sdpa"
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture
def rows():
    torch.manual_seed(1)
    return [torch.randint(0, 97, (1, length)) for length in LENGTHS]


def packed(rows):
    """One row of all tokens, as verl packs them: no mask, and positions that begin anew with each row."""
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    return {"input_ids": torch.cat(rows, dim=1), "attention_mask": None, "position_ids": positions, "use_cache": False}


def test_packed_rows_do_not_see_each_other(model, rows):
    alone = torch.cat([model(row, use_cache=False).logits for row in rows], dim=1)
    together = model(**packed(rows)).logits
    assert torch.allclose(together, alone, atol=1e-5)
    # It could have been otherwise: as one long row they differ.
    one = model(torch.cat(rows, dim=1), use_cache=False).logits
    assert not torch.allclose(one, alone, atol=1e-2)


def test_log_probs_and_gradients_from_hidden_states_are_those_from_logits(model, rows):
    inputs = packed(rows)
    labels = torch.roll(inputs["input_ids"], -1, dims=1)

    def gradient(log_probs):
        model.zero_grad()
        log_probs.sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    hidden = model.model(**inputs).last_hidden_state
    fused, entropy = FusedLinearForPPO(chunk_size=4)(hidden, model.lm_head.weight, labels)
    by_fused = gradient(fused)
    logits = model(**inputs).logits.float().log_softmax(-1)
    plain = logits.gather(-1, labels[..., None]).squeeze(-1)
    assert torch.allclose(fused, plain, atol=1e-5)
    assert torch.allclose(entropy, -(logits.exp() * logits).sum(-1), atol=1e-5)
    assert torch.allclose(by_fused, gradient(plain), atol=1e-4)
