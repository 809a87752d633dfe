# SPDX-License-Identifier: Apache-2.0
"""Model and tokenizer: a folder that holds what is needed, or the name of one on a hub; prompts counted in tokens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from .data import Rows
from .findings import Problems, Seen

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.index.json")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PATH = "actor_rollout_ref.model.path"


def check_model(config: DictConfig) -> Seen:
    """`actor_rollout_ref.model.path`, and `tokenizer_path` where it is another.

    Returns:
        Its value is the path or name of the tokenizer, or None where it cannot be read here.

    Raises:
        Problems: neither a folder with configuration, weights and tokenizer, nor a hub's name.
    """
    model = config.actor_rollout_ref.model
    path, tokenizer = model.path, model.get("tokenizer_path") or model.path
    problems = _folder_problems(_PATH, path, weights=True, tokenizer=tokenizer == path)
    if tokenizer != path:
        problems += _folder_problems("actor_rollout_ref.model.tokenizer_path", tokenizer, weights=False, tokenizer=True)
    if problems:
        raise Problems(*problems)
    if "://" in path:
        return Seen(f"{_PATH}={path}: remote, read by verl alone")
    if not os.path.isdir(os.path.expanduser(path)):
        return Seen(f"{_PATH}={path}: a hub's name, {_where(path)}", tokenizer)
    return Seen(f"{_PATH}={path}: configuration, weights and tokenizer are there", tokenizer)


def check_context(config: DictConfig) -> Seen:
    """Whether the longest prompt and the longest answer fit into the model's context, where its configuration is here.

    Beyond it the engine ends answers, and verl says nothing.

    Raises:
        Problems: they do not fit, or the context is stretched for the trainer alone.
    """
    model, rollout, data = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.data
    own = _context(configuration(model.path))
    changes = model.get("override_config") or {}
    changes = changes.get("model_config") or changes
    context = _context(changes) or own
    needed = [data.max_prompt_length, data.max_response_length, rollout.get("max_model_len") or 0]
    if context is None or not all(isinstance(length, int) for length in needed):
        return Seen(f"{_PATH}={model.path}: its context is not known here; the engine looks at it as the run starts")
    prompt, response, longest = needed
    if prompt + response > context or longest > context:
        setting, value = "data.max_response_length", response
        accepted = f"at most {context - prompt} is accepted with data.max_prompt_length={prompt}"
        if prompt + response <= context:
            setting, value, accepted = "actor_rollout_ref.rollout.max_model_len", longest, f"at most {context}"
        raise Problems(
            f"{setting}={value}: {accepted}, since {model.path} has a context of {context} tokens, at which answers "
            f"would be cut off; to stretch it: {' '.join(_stretch(max(prompt + response, longest)))}"
        )
    stretched = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    if rollout.name == "vllm" and own is not None and own < max(prompt + response, longest):
        if (_context(stretched.get("hf_overrides") or {}) or own) < max(prompt + response, longest):
            raise Problems(
                f"actor_rollout_ref.model.override_config.max_position_embeddings={context}: vLLM reads the model's "
                f"own configuration, which says {own}; set {_stretch(context)[1]} as well"
            )
    return Seen(f"{_PATH}={model.path}: prompt and answer fit into its context of {context} tokens")


def _stretch(tokens: int) -> list[str]:
    """Overrides that give trainer and engine another context."""
    return [
        f"+actor_rollout_ref.{place}.max_position_embeddings={tokens}"
        for place in ("model.override_config", "rollout.engine_kwargs.vllm.hf_overrides")
    ]


def model_folder(path: str) -> Path | None:
    """Where a model is on this machine: a folder, or the hub's local cache; None where it is not here."""
    if os.path.isdir(folder := os.path.expanduser(path)):
        return Path(folder)
    file = _HUB_NAME.match(path) and _cached(path)
    return Path(file).parent if file else None


def configuration(path: str) -> Mapping[str, Any]:
    """The model's config.json; empty where it is not here."""
    folder = model_folder(path)
    return json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else {}


def _context(configuration: Mapping[str, Any]) -> int | None:
    """Tokens of context that a model's configuration, or a change to it, says."""
    text = configuration.get("text_config") or {}
    return configuration.get("max_position_embeddings") or text.get("max_position_embeddings")


def check_attention(config: DictConfig) -> Seen:
    """Whether what FSDP's attention on a GPU is asked to be can be imported: verl's default is flash_attention_2.

    Without a GPU here it is a warning: the run may be meant for other machines.

    Raises:
        Problems: this machine has a GPU, and neither of the two packages that give it.
    """
    model = config.actor_rollout_ref.model
    wanted = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    on_gpu = config.trainer.device == "cuda" and config.actor_rollout_ref.actor.strategy.startswith("fsdp")
    # transformers takes the one from `kernels` where flash_attn is missing.
    if not on_gpu or wanted != "flash_attention_2" or find_spec("flash_attn") or find_spec("kernels"):
        return Seen(f"attention: {wanted if on_gpu else 'nothing is needed for it'}")
    import torch

    said = (
        "actor_rollout_ref.model.override_config.attn_implementation: flash_attention_2 is verl's default, and neither "
        'flash_attn nor kernels is installed: pip install --no-build-isolation "verl[flash-attn-cu130torch211]==0.9.1" '
        '(built with the compiler of CUDA 13) or "kernels>=0.12,<0.13" (fetched from the hub as a run starts), or set '
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa, with "
        "actor_rollout_ref.model.use_fused_kernels=True"
    )
    if torch.cuda.is_available():
        raise Problems(said)
    return Seen("attention: is not tried, this machine has no GPU", warnings=(said,))


def _folder_problems(setting: str, path: Any, weights: bool, tokenizer: bool) -> list[str]:
    if not isinstance(path, str) or not path:
        return [f"{setting}={path!r}: accepted are a folder or a hub's name such as Qwen/Qwen3-4B-Base"]
    if "://" in path:
        return []
    # os.path's functions take users that are not known and names that are too long, too.
    folder = Path(os.path.expanduser(path))
    if not os.path.isdir(folder):
        if os.path.exists(folder):
            return [f"{setting}={path}: is a file; accepted are a folder or a hub's name"]
        if not _HUB_NAME.match(path):
            return [f"{setting}={path}: no such folder, and not a hub's name such as Qwen/Qwen3-4B-Base"]
        if _offline() and _cached(path) is None:
            return [
                f"{setting}={path}: no such folder, and as a hub's name it is not in the local cache, "
                f"which HF_HUB_OFFLINE=1 asks for alone: name a folder, or fetch it first"
            ]
        return []
    problems = []
    if weights:
        try:
            json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except OSError:
            problems.append(f"{setting}={path}: the folder has no config.json; accepted is a Hugging Face model folder")
        except ValueError as error:
            problems.append(f"{setting}={path}: config.json is not JSON: {error}")
        if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
            problems.append(f"{setting}={path}: the folder has no weights ({', '.join(_WEIGHTS)})")
    if tokenizer and not any((folder / name).is_file() for name in _TOKENIZER):
        problems.append(f"{setting}={path}: the folder has no tokenizer ({', '.join(_TOKENIZER)})")
    return problems


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _cached(name: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return found if isinstance(found, str) else None


def _where(name: str) -> str:
    return "in the local cache" if _cached(name) else "not in the local cache: fetched when the run starts"


def check_lengths(config: DictConfig, tokenizer_path: str, rows: Rows) -> Seen:
    """Tokens of the longest prompts (a thousand, by bytes of text), as verl counts them, and `data.max_prompt_length`.

    Raises:
        Problems: the tokenizer cannot be loaded or has no chat template; longer prompts, by row, where they would be
            cut without a word; fewer prompts left than a batch where they are filtered out.
    """
    from verl.utils.tokenizer import normalize_token_ids

    tokenizer = _load_tokenizer(config, tokenizer_path)
    kwargs = dict(config.data.get("apply_chat_template_kwargs") or {})
    kwargs.update(tokenize=True, add_generation_prompt=True, return_dict=False)
    limit, over, most = config.data.max_prompt_length, [], 0
    for _, _, path, number, prompt in sorted(rows.longest, reverse=True):
        try:
            tokens = len(normalize_token_ids(tokenizer.apply_chat_template(prompt, **kwargs)))
        except Exception as error:
            raise Problems(
                f"{rows.setting}: row {number} of {path}: the chat template of {tokenizer_path} fails on its prompt: "
                f"{' '.join(str(error).split())}"
            ) from error
        most = max(most, tokens)
        if tokens > limit:
            over.append((number, path, tokens))
    if not over:
        return Seen(f"{rows.setting}: the longest prompt has {most} tokens of data.max_prompt_length={limit}")
    return _over_long(config, rows, limit, over)


def _over_long(config: DictConfig, rows: Rows, limit: int, over: list[tuple[int, str, int]]) -> Seen:
    number, path, tokens = over[0]
    least = "at least " if len(over) == len(rows.longest) < len(rows.keys) or rows.read < rows.total else ""
    what = (
        f"{rows.setting}: {least}{len(over)} prompts are longer than data.max_prompt_length={limit} tokens "
        f"(row {number} of {path}: {tokens})"
    )
    if config.data.get("filter_overlong_prompts"):
        left = rows.total - len(over)
        if rows.setting == "data.train_files" and left < config.data.train_batch_size:
            raise Problems(
                f"{what}; data.filter_overlong_prompts=True leaves {left}, fewer than "
                f"data.train_batch_size={config.data.train_batch_size}"
            )
        return Seen(f"{rows.setting}: counted", None, (f"{what}; verl leaves them out",))
    if config.data.get("truncation") == "left":
        return Seen(f"{rows.setting}: counted", None, (f"{what}; their beginning is cut off",))
    raise Problems(
        f"{what}; verl's agent loop cuts off their beginning: set data.filter_overlong_prompts=True, a larger "
        f"data.max_prompt_length, or data.truncation=left if that is wanted"
    )


def _load_tokenizer(config: DictConfig, path: str) -> Any:
    from verl.utils import hf_tokenizer

    model = config.actor_rollout_ref.model
    try:
        tokenizer = hf_tokenizer(os.path.expanduser(path), trust_remote_code=model.get("trust_remote_code", False))
    except Exception as error:
        raise Problems(f"the tokenizer of {path} cannot be loaded: {' '.join(str(error).split())}") from error
    if model.get("custom_chat_template"):
        tokenizer.chat_template = model.custom_chat_template
    if not tokenizer.chat_template:
        raise Problems(
            f"the tokenizer of {path} has no chat template, which verl's agent loop needs: "
            f"set actor_rollout_ref.model.custom_chat_template, or use another model"
        )
    return tokenizer
