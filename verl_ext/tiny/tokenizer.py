"""The tokenizer of the tiny policy: one token a byte, and three special tokens.

It is a Qwen2Tokenizer without merges, because transformers 5 loads that class for every `model_type: qwen2`, whatever
tokenizer.json says. A byte's id is the byte's value, so that encoding is `list(text.encode())`.
"""

from __future__ import annotations

from transformers import Qwen2Tokenizer

from verl_ext.tiny.tokens import END_ID, PAD_ID, START_ID

__all__ = ["END_ID", "PAD_ID", "START_ID", "make_tokenizer"]

PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# The prompt is the user's text and nothing else. An assistant's turn ends as in Qwen's own template, which is what
# verl's Qwen token builder expects between turns.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
)


def byte_symbols() -> list[str]:
    """The printable symbol that byte-level BPE writes for each byte 0..255.

    GPT-2's table: printable Latin-1 bytes stand for themselves, the other 68 are numbered on from U+0100.
    """
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    symbols, extra = [], 256
    for byte in range(256):
        if byte in plain:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(extra))
            extra += 1
    return symbols


def make_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer: ids 0..255 are the bytes, then padding, <|im_start|> and the end token <|im_end|>."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    vocab |= {PAD_TOKEN: PAD_ID, START_TOKEN: START_ID, END_TOKEN: END_ID}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        unk_token=PAD_TOKEN,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=[START_TOKEN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
