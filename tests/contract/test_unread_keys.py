"""The keys that verl composes and does not read are those that are listed, in the code and in docs/configuration.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import verl
from omegaconf import DictConfig, OmegaConf

from verl_ext.checks.findings import Problems
from verl_ext.checks.unread import MOVED, WITHOUT_EFFECT, check_unread
from verl_ext.configuration import compose_config, verl_defaults

LISTED = MOVED | WITHOUT_EFFECT
# Not part of a run in verl's V1 trainer with rules: other trainers, their tools, the classes that only name the keys.
_ELSEWHERE = re.compile(
    r"main_ppo_v0|ppo/ray_trainer\.py|fully_async|one_step_off|experimental/(separation|vla|transfer)|rollout_skip|"
    r"trainer_(colocate|separate)_async|^trainer/(sft|main_(eval|gen))|^workers/(reward_manager|config)/|^trainer/config|"
    r"^workers/rollout/schemas|hf_rollout"
)
# Handed on whole to another package or to a dataclass that acts on them.
_HANDED_ON = re.compile(
    r"^transfer_queue\.|nsight_options|turbo_config|\.lora\.|kw_args$|^ray_kwargs\.|external_lib$|tiled_mlp|_target_$"
)


def keys(section, name=""):
    for key in section:
        full = f"{name}.{key}" if name else str(key)
        value = section._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_interpolation() and len(value):
            yield from keys(value, full)
        else:
            yield full


def listed(key):
    return any(key == top or key.startswith(f"{top}.") for top in LISTED)


def test_a_key_whose_name_stands_nowhere_in_verls_code_is_listed():
    root = Path(verl.__file__).parent
    files = {str(path.relative_to(root)): path for path in root.rglob("*.py")}
    code = "\n".join(path.read_text() for name, path in files.items() if not _ELSEWHERE.search(name))
    named = set(re.findall(r"\.([A-Za-z_]\w*)", code)) | set(re.findall(r"['\"]([A-Za-z_][\w-]*)['\"]", code))
    unread = [key for key in keys(verl_defaults()) if key.rpartition(".")[2] not in named]
    missing = [key for key in unread if not listed(key) and not _HANDED_ON.search(key)]
    assert len(unread) > 20 and missing == []


def test_every_key_that_is_listed_is_verls():
    defaults = verl_defaults()
    for key in LISTED:
        parent, _, name = key.rpartition(".")
        assert name in (OmegaConf.select(defaults, parent) if parent else defaults), key


@pytest.mark.parametrize("recipe", [[], ["recipe=cpu/grpo"], ["recipe=cpu/sara"], ["recipe=dapo_math_17k/sara"]])
def test_our_own_recipes_set_none_of_them(recipe):
    assert check_unread(compose_config(recipe)).warnings == ()


@pytest.mark.bad_input
@pytest.mark.parametrize("key, value, name", [
    ("custom_reward_function.path", "mine.py", "reward.custom_reward_function"),
    ("reward_model.enable", True, "reward.reward_model"),
    ("reward_model.reward_manager", "dapo", "reward.reward_manager"),
    ("sandbox_fusion.url", "http://there", "reward.sandbox_fusion"),
    ("actor_rollout_ref.actor.grad_clip", 0.5, "actor_rollout_ref.actor.optim.clip_grad"),
])  # fmt: skip
def test_a_key_with_another_name_is_refused_with_it(key, value, name):
    config = compose_config([])
    OmegaConf.update(config, key, value)
    said = rf"{re.escape(key)}={value!r}: verl 0.9.1 does not read it; accepted is .*{name}"
    with pytest.raises(Problems, match=said):
        check_unread(config)


def test_a_key_without_effect_is_warned_of():
    config = compose_config(["trainer.balance_batch=False", "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
                             "trainer.v1.separate_async.parameter_sync_step=8"])  # fmt: skip
    said = "\n".join(check_unread(config).warnings)
    assert len(said.splitlines()) == 3 and "trainer.balance_batch=False has no effect" in said
    assert "val_kwargs.temperature decides" in said and "parameter_sync_step=8" in said


def test_docs_list_them_all():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    table = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|$", page.split("## Keys of verl's that are not read")[1], re.M)
    wanted = {key: f"refused; `{new}`" for key, new in MOVED.items()} | dict(WITHOUT_EFFECT)
    assert {key: said.replace("`", "") for key, said in table} == {k: v.replace("`", "") for k, v in wanted.items()}
