# SPDX-License-Identifier: Apache-2.0
"""Replace credentials in a configuration by `***` before it is printed, saved or shown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_SECRET_WORDS = {"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey", "pat"}
_KEYS_OF = {"api", "access", "account", "auth", "encryption", "license", "private", "secret", "signing", "ssh"}
_TOKENS_OF = {"access", "api", "auth", "bearer", "bot", "deploy", "git", "github", "gitlab", "hf", "hub", "huggingface",
              "id", "login", "oauth", "refresh", "session", "swanlab", "trackio", "wandb", "write"}  # fmt: skip
_IN_ENVIRONMENT = {"key", "token", "auth", "pass", "pwd"}
_ENVIRONMENTS = ("env_vars", "env", "environ", "environment", "headers", "extra_headers")
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):([^/\s@]+)@")
_OVERRIDE = re.compile(r"^(\+{0,2}~?)([^=]+)=(.*)$", re.S)


def _words(name: str) -> list[str]:
    """Split a name such as `WANDB_API_KEY`, `apiKey` or `hf-token` into words."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word for word in re.split(r"[^a-z0-9]+", split.lower()) if word]


def is_secret(name: str, environment: bool = False) -> bool:
    """Whether a key clearly names a credential.

    `token` and `key` alone say little (`max_token_len`, `pad_token`, `prompt_key`): they count where the word before
    them says whose they are (`hf_token`, `api_key`), where the name is `token` and nothing else, and at the end of the
    name of a variable of the environment.
    """
    words = _words(name)
    if not words:
        return False
    if _SECRET_WORDS & set(words) or words == ["token"]:
        return True
    pairs = set(zip(words, words[1:], strict=False))
    if any(last == "key" and owner in _KEYS_OF or last == "token" and owner in _TOKENS_OF for owner, last in pairs):
        return True
    return environment and words[-1] in _IN_ENVIRONMENT


def masked(value: Any, environment: bool = False) -> Any:
    """Nested dicts and lists with the text of every credential masked, and passwords in URLs; all else as it was.

    Only texts are masked: a number or None under such a name is no credential (`token: 3`).
    """
    if isinstance(value, Mapping):
        return {
            key: MASK
            if isinstance(item, str) and item and is_secret(str(key), environment)
            else masked(item, environment or str(key) in _ENVIRONMENTS)
            for key, item in value.items()
        }
    if isinstance(value, str):
        return _URL_PASSWORD.sub(rf"\1:{MASK}@", value)
    if isinstance(value, Sequence):
        return [masked(item, environment) for item in value]
    return value


def masked_override(override: str) -> str:
    """A Hydra override (`+a.b.api_key=...`) with a credential masked."""
    match = _OVERRIDE.match(override)
    if not match:
        return _URL_PASSWORD.sub(rf"\1:{MASK}@", override)
    sign, name, value = match.groups()
    parts = name.split(".")
    environment = any(part in _ENVIRONMENTS for part in parts[:-1])
    if value not in ("", "null") and is_secret(parts[-1], environment):
        return f"{sign}{name}={MASK}"
    if value.startswith("{"):
        # A whole mapping in one override: masked value by value.
        value = re.sub(
            r"([\w-]+)(\s*:\s*)('[^']*'|\"[^\"]*\"|[^,{}\s]+)",
            lambda m: m[1] + m[2] + MASK
            if is_secret(m[1], environment or parts[-1] in _ENVIRONMENTS)
            else m[0],
            value,
        )
    return f"{sign}{name}={_URL_PASSWORD.sub(rf'{chr(92)}1:{MASK}@', value)}"
