"""Every recipe for DAPO-Math-17K composes for every model and machine, passes verl's checks and ours, and says what is
so.

scripts/dapo_math_17k/run.sh is run with a stand-in for Python that prints what it is given: what it would start is what
is checked. A covering subset is quick; the whole product is `long`.
"""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

import verl_ext.main_ppo as main_ppo
from tests.unit.data.data_files import published, write_rows
from verl_ext.checks import Problems
from verl_ext.checks.allocation_settings import check_config
from verl_ext.checks.model import check_context
from verl_ext.checks.reward_trial import check_reward
from verl_ext.configuration import compose_config
from verl_ext.cpu.version_alias import install_alias
from verl_ext.data.dapo_math_17k import prepare

CONFIGS = Path(main_ppo.__file__).parent / "configs"
SCRIPTS = Path(main_ppo.__file__).parent.parent / "scripts" / "dapo_math_17k"
RECIPES = sorted(p.stem for p in (CONFIGS / "recipe/dapo_math_17k").glob("*.yaml") if p.stem != "base")
MODELS = sorted(p.stem for p in (CONFIGS / "model").glob("*.yaml"))
HARDWARE = {"gpu_1x8": (1, 8), "gpu_4x8": (4, 8), "gpu_1x1": (1, 1)}
TUNINGS = ["full", "lora"]
# Parameters in units of 10^9, tokens of context, words, width of the embedding, bytes of keys and values a token.
KNOWN = {
    "llama3_2_3b_instruct": (3.21, 131072, 128256, 3072, 2 * 28 * 8 * 128 * 2),
    "qwen2_5_3b": (3.09, 32768, 151936, 2048, 2 * 36 * 2 * 128 * 2),
    "qwen2_5_7b": (7.62, 131072, 152064, 3584, 2 * 28 * 4 * 128 * 2),
    "qwen2_5_math_7b": (7.62, 4096, 152064, 3584, 2 * 28 * 4 * 128 * 2),
    "qwen3_14b_base": (14.77, 32768, 151936, 5120, 2 * 40 * 8 * 128 * 2),
    "qwen3_4b_base": (4.02, 32768, 151936, 2560, 2 * 36 * 8 * 128 * 2),
    "qwen3_4b_instruct": (4.02, 262144, 151936, 2560, 2 * 36 * 8 * 128 * 2),
    "qwen3_8b_base": (8.19, 32768, 151936, 4096, 2 * 36 * 8 * 128 * 2),
    "r1_distill_qwen_1_5b": (1.78, 131072, 151936, 1536, 2 * 28 * 2 * 128 * 2),
}
ENGINE_SHARE = {"qwen3_4b_base": 0.7, "qwen3_4b_instruct": 0.7}
# Each recipe and model at least once, with machines and tunings in turn.
MOST = max(len(RECIPES), len(MODELS))
COVERING = [
    tuple(choices[i % len(choices)] for choices in (RECIPES, MODELS, list(HARDWARE), TUNINGS)) for i in range(MOST)
]


@pytest.fixture(autouse=True)
def lora_ranks(request, monkeypatch):
    """verl asks vLLM which LoRA ranks it takes. Importing vLLM takes long: quick tests have its list, others ask."""
    if request.node.get_closest_marker("long"):
        monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        monkeypatch.setattr(sys, "path", list(sys.path))
        install_alias()
        return

    def checked(rank):
        assert rank in (1, 8, 16, 32, 64, 128, 256, 320, 512)
        return rank

    module = types.ModuleType("verl.workers.rollout.vllm_rollout.utils")
    module.get_vllm_max_lora_rank = checked
    package = types.ModuleType("verl.workers.rollout.vllm_rollout")
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.vllm_rollout", package)
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.vllm_rollout.utils", module)


def check(overrides, model, hardware, tuning):
    """Compose and put through everything that main_ppo does before Ray starts, but for the files of the data."""
    config = compose_config(overrides)
    OmegaConf.resolve(config)
    settings, budget = check_config(config)
    validate_config(
        config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
    )
    # Unknown keys show here.
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == HARDWARE[hardware]
    assert budget.ranks == HARDWARE[hardware][0] * HARDWARE[hardware][1]
    data, worker = config.data, config.actor_rollout_ref
    tokens = data.max_prompt_length + data.max_response_length
    assert tokens <= min(KNOWN[model][1], worker.actor.ppo_max_token_len_per_gpu)
    assert worker.rollout.tensor_model_parallel_size <= config.trainer.n_gpus_per_node
    assert worker.model.lora_rank == (64 if tuning == "lora" else 0)
    # The tuning's and the machine's settings are not undone by the recipe, which is read between them.
    assert worker.actor.optim.lr == (5e-6 if tuning == "lora" else 1e-6)
    assert worker.rollout.load_format == ("safetensors" if tuning == "lora" else "dummy")
    share = ENGINE_SHARE.get(model, 0.5 if hardware == "gpu_1x1" else 0.6)
    assert worker.rollout.gpu_memory_utilization == share
    assert worker.rollout.max_model_len == tokens
    assert worker.rollout.log_prob_max_token_len_per_gpu >= worker.actor.ppo_max_token_len_per_gpu
    assert worker.actor.strategy == config.critic.strategy == "fsdp2"
    assert worker.actor.fsdp_config.fsdp_size == (8 if hardware == "gpu_4x8" else -1)
    assert worker.model.use_fused_kernels and worker.model.use_remove_padding
    # A weight is sent whole.
    _, _, words, width, _ = KNOWN[model]
    assert words * width * 4 < worker.rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
    assert worker.actor.fsdp_config.param_offload == (hardware == "gpu_1x1")
    assert worker.actor.use_dynamic_bsz and worker.rollout.log_prob_use_dynamic_bsz
    assert (settings.rounds == "streaming") == (settings.allocator["name"] == "sara")
    assert set(config.trainer.logger) == {"console", "file", "wandb"}
    assert importlib.util.find_spec(config.reward.custom_reward_function.path.removeprefix("pkg://")) is not None
    assert model in config.trainer.experiment_name and tuning in config.trainer.experiment_name
    return config, settings, budget


@pytest.mark.parametrize("case", COVERING, ids="-".join)
def test_recipe_and_script_pass_verls_checks_and_ours_and_say_what_is_so(case, tmp_path, monkeypatch):
    recipe, model, hardware, tuning = case
    groups = [f"model={model}", f"hardware={hardware}", f"tuning={tuning}"]
    arguments = started("run.sh", tmp_path, recipe, *groups)
    assert arguments[:3] == ["-m", "verl_ext.main_ppo", f"recipe=dapo_math_17k/{recipe}"]
    monkeypatch.setenv("HOME", str(tmp_path))
    config, _, budget = check(arguments[2:], model, hardware, tuning)
    assert config.data.train_files == f"{tmp_path}/data/verl_ext/dapo_math_17k.parquet"
    assert config.trainer.experiment_name == f"{recipe}-{model}-{tuning}-seed1"
    said = head(CONFIGS / f"recipe/dapo_math_17k/{recipe}.yaml")
    most = number(re.search(r"Rollouts a step: ([\d,]+) at most", said)[1])
    rows, updates = re.search(r"([\d,]+) rows[^,.]*, (\d+) optimizer steps", said).groups()
    assert (budget.rollouts, budget.prompts * budget.rows_per_group, budget.optimizer_steps) == (
        most, number(rows), int(updates),
    )  # fmt: skip
    memory = re.search(r"estimate\): ([\d,]+) x 6,144 tokens x 40 bytes = ([\d.]+) GB", said)
    assert number(memory[1]) == most and float(memory[2]) == pytest.approx(most * 6144 * 40 / 1e9, abs=0.051)
    assert f"{most:,}" in table_row(recipe)


def test_the_subset_covers():
    assert {case[0] for case in COVERING} == set(RECIPES)
    assert {case[1] for case in COVERING} == set(MODELS) == set(KNOWN)
    assert {case[2] for case in COVERING} == set(HARDWARE) and {case[3] for case in COVERING} == set(TUNINGS)


@pytest.mark.long
@pytest.mark.parametrize("case", list(itertools.product(RECIPES, MODELS, HARDWARE, TUNINGS)), ids="-".join)
def test_every_combination(case):
    recipe, model, hardware, tuning = case
    groups = [f"model={model}", f"hardware={hardware}", f"tuning={tuning}"]
    config, _, _ = check([f"recipe=dapo_math_17k/{recipe}", *groups], model, hardware, tuning)
    assert config.trainer.experiment_name == f"{recipe}-{model}-{tuning}"


def started(script, tmp_path, *arguments, **environment):
    """What a script would start."""
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    kept = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(["bash", SCRIPTS / script, *arguments], check=True, capture_output=True, text=True,
                          env={**kept, "PYTHON": str(stub), **environment})  # fmt: skip
    return done.stdout.splitlines()


def test_the_smaller_batch_for_one_gpu_that_the_readme_gives(tmp_path):
    readme = (CONFIGS / "recipe/dapo_math_17k/README.md").read_text()
    (command,) = re.findall(r"run\.sh (sara_dps .*gpu_1x1(?:.*\\\n)*.*)", readme)
    arguments = started("run.sh", tmp_path, *command.replace("\\\n", " ").split())
    _, _, budget = check(arguments[2:], "r1_distill_qwen_1_5b", "gpu_1x1", "lora")
    assert (budget.prompts, budget.rollouts, budget.ranks, budget.optimizer_steps) == (32, 256, 1, 2)


def test_every_recipe_is_run_with_the_same_model(tmp_path):
    paths = set()
    for recipe in RECIPES:
        config = compose_config(started("run.sh", tmp_path, recipe)[2:])
        paths.add(config.actor_rollout_ref.model.path)
    assert paths == {"Qwen/Qwen2.5-Math-7B"}


def test_the_script_takes_seed_and_data_from_the_environment_and_all_else_from_the_command_line(tmp_path, monkeypatch):
    groups = "model=qwen3_4b_base", "hardware=gpu_4x8"
    keys = "trainer.test_freq=3", "allocation.allocator.probe=3", "actor_rollout_ref.model.path=/m"
    arguments = started("run.sh", tmp_path, "sara", *groups, *keys, SEED="7")
    monkeypatch.setenv("VERL_EXT_DATA", "/d")
    config, settings, _ = check(arguments[2:], "qwen3_4b_base", "gpu_4x8", "full")
    assert config.actor_rollout_ref.model.path == "/m" and config.data.train_files == "/d/dapo_math_17k.parquet"
    assert settings.seed == config.data.seed == 7 and settings.allocator["probe"] == 3
    assert config.trainer.test_freq == 3
    assert config.trainer.experiment_name == "sara-qwen3_4b_base-full-seed7"


@pytest.mark.parametrize("recipe", ["", "sarra", "base", "sara/../grpo"])
def test_the_script_refuses_what_is_no_recipe(tmp_path, recipe):
    with pytest.raises(subprocess.CalledProcessError) as error:
        started("run.sh", tmp_path, *([recipe] if recipe else []))
    assert error.value.returncode == 2
    assert f"RECIPE='{recipe}': accepted are {' '.join(RECIPES)}\n" == error.value.stderr.removeprefix("run.sh: ")


def test_the_data_script_makes_what_the_recipes_read(tmp_path):
    hub = started("prepare_data.sh", tmp_path, VERL_EXT_DATA="/d")
    assert hub[:4] == ["-m", "verl_ext.data.dapo_math_17k", "--output", "/d/dapo_math_17k.parquet"]
    assert "--input" not in hub
    local = started("prepare_data.sh", tmp_path, RAW_DIR="/raw", TEMPLATE="boxed")
    assert "/raw/dapo-math-17k.parquet" in local and "aime_2024=/raw/aime-2024.parquet" in local
    assert local.count("boxed") == 2


def test_prepared_data_passes_the_checks_of_a_start(tmp_path, monkeypatch):
    rows = [published(f"What is {i} + 1?", str(i + 1), seed=i) for i in range(8)]
    prepare(tmp_path / "dapo_math_17k.parquet", [write_rows(tmp_path / "raw.parquet", rows)])
    monkeypatch.setenv("VERL_EXT_DATA", str(tmp_path))
    arguments = started("run.sh", tmp_path, "sara_dps", "model=r1_distill_qwen_1_5b", "data.train_batch_size=8",
                        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "allocation.stop.rollouts=64")  # fmt: skip
    config, settings, _ = check(arguments[2:], "r1_distill_qwen_1_5b", "gpu_1x8", "full")
    row = pq.read_table(config.data.train_files).to_pylist()[0]
    assert row["reward_model"]["ground_truth"] == "1"
    said = check_reward(config, settings, [row])
    assert "pkg://verl_ext.rewards.math_verify" in said and "'acc': False" in said


@pytest.mark.parametrize("model", MODELS)
def test_memory_in_the_models_files_follows_from_their_sizes(model):
    said = head(CONFIGS / f"model/{model}.yaml")
    size, context, words, width, keys = KNOWN[model]
    assert f"{size} billion parameters, a context of {context:,} tokens" in said
    whole, shard = re.search(r"whole on 1 GPU: ([\d.]+) GB; over the 8 of a node: ([\d.]+) GB", said).groups()
    logits = re.search(r"bytes \(bf16, fp32 and its gradient\) = ([\d.]+) GB", said)[1]
    engine = re.search(r"weights ([\d.]+) GB \(bf16\)", said)[1]
    adapters = re.search(r"on 1 GPU ([\d.]+) GB", said)[1]
    stated = [float(figure) for figure in (whole, shard, logits, engine, adapters)]
    assert stated == pytest.approx([16 * size, 2 * size, 512 * words * 10 / 1e9, 2 * size, 4 * size], abs=0.051)
    assert f"512 tokens at once x vocabulary {words:,} x 10 bytes" in said and f"values, {keys:,} bytes a token" in said
    # What the file says fits on one GPU: the training state beside 20 GB of activations; with adapters, the trainer's
    # weights in fp32 and the engine's in bf16, both there while weights travel.
    fits = said.partition("Fits in 80 GB: ")[2]
    assert fits.startswith("gpu_1x8, gpu_4x8")
    assert ("gpu_4x8, gpu_1x1." in fits) == (16 * size + 1 < 60)
    assert ("not gpu_1x1" in fits) == (6 * size > 70)


def test_a_model_with_a_short_context_says_how_to_stretch_it(tmp_path):
    said = (CONFIGS / "model/qwen2_5_math_7b.yaml").read_text()
    overrides = re.findall(r"# (\+actor\S+)", said)
    assert len(overrides) == 2
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    given = ["recipe=dapo_math_17k/grpo", f"actor_rollout_ref.model.path={tmp_path}", "data.max_response_length=8192"]
    with pytest.raises(Problems, match="data.max_response_length=8192: at most 3072 is accepted"):
        check_context(compose_config(given))
    check_context(compose_config([*given, *overrides]))


def head(path):
    """The comment at the top of a file, its lines joined."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def number(text):
    return int(text.replace(",", ""))


def table_row(recipe):
    readme = (CONFIGS / "recipe/dapo_math_17k/README.md").read_text()
    return next(line for line in readme.splitlines() if line.startswith(f"| `dapo_math_17k/{recipe}` |"))
