"""Every recipe for DAPO-Math-17K composes for every model and machine, passes verl's checks and ours, and says what is
so.

The scripts under scripts/dapo_math_17k are run with a stand-in for Python that prints what it is given: what they would
start is what is checked. A covering subset is quick; the whole product is `long`.
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
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

import verl_ext.main_ppo as main_ppo
from tests.unit.data.data_files import published, write_rows
from verl_ext.checks.allocation import check_config
from verl_ext.checks.reward import check_reward
from verl_ext.cpu.version_alias import install_alias
from verl_ext.data.dapo_math_17k import prepare

CONFIGS = Path(main_ppo.__file__).parent / "configs"
SCRIPTS = Path(main_ppo.__file__).parent.parent / "scripts" / "dapo_math_17k"
RECIPES = sorted(p.stem for p in (CONFIGS / "recipe/dapo_math_17k").glob("*.yaml") if p.stem != "base")
MODELS = sorted(p.stem for p in (CONFIGS / "model").glob("*.yaml"))
HARDWARE = {"gpu_1x8": (1, 8), "gpu_4x8": (4, 8), "gpu_1x1": (1, 1)}
TUNINGS = ["full", "lora"]
# Parameters in units of 10^9, tokens of context, and what the names say.
KNOWN = {
    "qwen2_5_math_7b": (7.62, 4096, 152064),
    "qwen3_4b_base": (4.02, 32768, 151936),
    "r1_distill_qwen_1_5b": (1.78, 131072, 151936),
}
# Each recipe once, each pair of model and machine, each tuning.
COVERING = [
    (recipe, model, hardware, TUNINGS[i % 2])
    for i, (recipe, (model, hardware)) in enumerate(
        zip(RECIPES, itertools.islice(itertools.cycle(itertools.product(MODELS, HARDWARE)), len(RECIPES)), strict=True)
    )
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
    with initialize_config_module("verl_ext.configs", version_base=None):
        config = compose("main", overrides=list(overrides))
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
    assert worker.rollout.gpu_memory_utilization == (0.5 if hardware == "gpu_1x1" else 0.6)
    assert worker.actor.fsdp_config.param_offload == (hardware == "gpu_1x1")
    assert worker.actor.use_dynamic_bsz and worker.rollout.log_prob_use_dynamic_bsz
    assert set(config.trainer.logger) == {"console", "file", "wandb"}
    assert importlib.util.find_spec(config.reward.custom_reward_function.path.removeprefix("pkg://")) is not None
    assert model in config.trainer.experiment_name and tuning in config.trainer.experiment_name
    return config, settings, budget


@pytest.mark.parametrize("case", COVERING, ids="-".join)
def test_recipe_and_script_pass_verls_checks_and_ours_and_say_what_is_so(case, tmp_path):
    recipe, model, hardware, tuning = case
    arguments = started(f"run_{recipe}.sh", tmp_path, MODEL=model, HARDWARE=hardware, TUNING=tuning)
    assert arguments[:3] == ["-m", "verl_ext.main_ppo", f"recipe=dapo_math_17k/{recipe}"]
    config, _, budget = check(arguments[2:], model, hardware, tuning)
    assert config.data.train_files == f"{tmp_path}/data/verl_ext/dapo_math_17k.parquet"
    assert config.trainer.experiment_name == f"{recipe}-{model}-{tuning}-seed1"
    # What the script sets by default is the recipe's own.
    own = OmegaConf.merge(*(OmegaConf.load(CONFIGS / f"recipe/dapo_math_17k/{part}.yaml") for part in ("base", recipe)))
    for key in ("data.train_batch_size", "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.ppo_mini_batch_size",
                "allocation.stop.rollouts", "trainer.total_training_steps"):  # fmt: skip
        given = OmegaConf.select(own, key)
        assert OmegaConf.select(config, key) == given or given is None and key == "allocation.stop.rollouts"
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
    assert {case[0] for case in COVERING} == set(RECIPES) and len(RECIPES) == 8
    assert {case[1] for case in COVERING} == set(MODELS) == set(KNOWN)
    assert {case[2] for case in COVERING} == set(HARDWARE) and {case[3] for case in COVERING} == set(TUNINGS)
    assert {p.name for p in SCRIPTS.glob("run_*.sh")} == {f"run_{r}.sh" for r in [*RECIPES, "sara_dps_1gpu_lora"]}


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


def test_the_script_for_one_gpu(tmp_path):
    arguments = started("run_sara_dps_1gpu_lora.sh", tmp_path)
    _, _, budget = check(arguments[2:], "r1_distill_qwen_1_5b", "gpu_1x1", "lora")
    assert (budget.prompts, budget.rollouts, budget.ranks, budget.optimizer_steps) == (32, 256, 1, 2)


def test_scripts_take_values_from_environment_and_command_line(tmp_path):
    arguments = started("run_sara.sh", tmp_path, "trainer.test_freq=3", "allocation.allocator.probe=3", MODEL_PATH="/m",
                        MODEL="qwen3_4b_base", HARDWARE="gpu_4x8", VERL_EXT_DATA="/d", SEED="7", STEPS="9")  # fmt: skip
    config, settings, _ = check(arguments[2:], "qwen3_4b_base", "gpu_4x8", "full")
    assert config.actor_rollout_ref.model.path == "/m" and config.data.train_files == "/d/dapo_math_17k.parquet"
    assert settings.seed == config.data.seed == 7 and settings.allocator["probe"] == 3
    assert config.trainer.test_freq == 3 and config.trainer.total_training_steps == 9
    assert config.trainer.experiment_name == "sara-qwen3_4b_base-full-seed7"


def test_the_data_script_makes_what_the_recipes_read(tmp_path):
    hub = started("prepare_data.sh", tmp_path, VERL_EXT_DATA="/d")
    assert hub[:4] == ["-m", "verl_ext.data.dapo_math_17k", "--output", "/d/dapo_math_17k.parquet"]
    assert "--input" not in hub
    local = started("prepare_data.sh", tmp_path, RAW_DIR="/raw", TEMPLATE="boxed")
    assert "/raw/dapo-math-17k.parquet" in local and "aime_2024=/raw/aime-2024.parquet" in local
    assert local.count("boxed") == 2


def test_prepared_data_passes_the_checks_of_a_start(tmp_path):
    rows = [published(f"What is {i} + 1?", str(i + 1), seed=i) for i in range(8)]
    prepare(tmp_path / "dapo_math_17k.parquet", [write_rows(tmp_path / "raw.parquet", rows)])
    arguments = started("run_sara_dps.sh", tmp_path, VERL_EXT_DATA=str(tmp_path), TRAIN_BATCH_SIZE="8",
                        MINI_BATCH_SIZE="4", STEP_ROLLOUTS="64")  # fmt: skip
    config, settings, _ = check(arguments[2:], "r1_distill_qwen_1_5b", "gpu_1x8", "full")
    row = pq.read_table(config.data.train_files).to_pylist()[0]
    assert row["reward_model"]["ground_truth"] == "1"
    said = check_reward(config, settings, row)
    assert "pkg://verl_ext.rewards.math_verify" in said and "'acc': False" in said


@pytest.mark.parametrize("model", MODELS)
def test_memory_in_the_models_files_follows_from_their_sizes(model):
    said = head(CONFIGS / f"model/{model}.yaml")
    size, _, words = KNOWN[model]
    assert f"{size} billion parameters" in said
    state = re.search(r"([\d.]+) GB on 1, ([\d.]+) GB on 8, ([\d.]+) GB on 32", said)
    for stated, gpus in zip(state.groups(), (1, 8, 32), strict=True):
        assert float(stated) == pytest.approx(16 * size / gpus, abs=0.051)
    assert float(re.search(r"bytes \(bf16, fp32 and its gradient\) = ([\d.]+) GB", said)[1]) == pytest.approx(
        16384 * words * 10 / 1e9, abs=0.051
    )
    assert float(re.search(r"weights ([\d.]+) GB \(bf16\)", said)[1]) == pytest.approx(2 * size, abs=0.051)
    assert float(re.search(r"on 1 GPU ([\d.]+) GB", said)[1]) == pytest.approx(4 * size, abs=0.051)
    assert words == number(re.search(r"vocabulary ([\d,]+)", said)[1])
    # Training state and logits within 80 GB: what the file says fits.
    full_on_one = "gpu_1x1." in said and "gpu_1x1 with" not in said
    assert full_on_one == (16 * size + 24.9 < 80) and 4 * size + 24.9 < 80


def head(path):
    """The comment at the top of a file, its lines joined."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def number(text):
    return int(text.replace(",", ""))


def table_row(recipe):
    readme = (CONFIGS / "recipe/dapo_math_17k/README.md").read_text()
    return next(line for line in readme.splitlines() if line.startswith(f"| `dapo_math_17k/{recipe}` |"))
