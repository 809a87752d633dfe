"""What is looked at on the machine before a run: attention, W&B's key, versions, and folders in the user's home."""

import importlib.util
import os
from importlib import metadata

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import verl_ext.compare as compare
import verl_ext.main_ppo as main_ppo
from tests.unit.checks.check_configs import NOWHERE, config_with
from verl_ext.checks import Checks, Problems, State, model, versions
from verl_ext.checks.local import _versions
from verl_ext.checks.wandb_login import check_wandb

SDPA = {"actor_rollout_ref.model.override_config": {"attn_implementation": "sdpa"}}
MEGATRON = {"actor_rollout_ref.actor.strategy": "megatron"}


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """No key of W&B's but those that a test gives."""
    monkeypatch.setenv("VERL_EXT_CACHE", NOWHERE)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "installed", "gpu", "values", "state"),
    [
        pytest.param("cuda", [], True, {}, State.PROBLEM, marks=pytest.mark.bad_input),
        ("cuda", [], False, {}, State.WARNING),
        ("cuda", ["flash_attn"], True, {}, State.OK),
        ("cuda", ["kernels"], True, {}, State.OK),
        ("cuda", [], True, SDPA, State.OK),
        ("cuda", [], True, MEGATRON, State.OK),
        ("cpu", [], False, {}, State.OK),
    ],
)
def test_flash_attention_is_missed_before_the_model_is_loaded(monkeypatch, device, installed, gpu, values, state):
    monkeypatch.setattr(model, "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    config = config_with("hardware=gpu_1x1", **{"trainer.device": device, **values})
    checks = Checks()
    checks.run("model", model.check_attention, config)
    last = checks.findings[-1]
    assert last.state is state
    if state is not State.OK:
        assert "attn_implementation=sdpa" in last.text and "verl[flash-attn-cu130torch211]==0.9.1" in last.text


def test_what_the_error_says_to_install_is_an_extra_of_verls():
    assert "flash-attn-cu130torch211" in metadata.metadata("verl").get_all("Provides-Extra")
    assert any("flash-attn==" in need and "flash-attn-cu130torch211" in need for need in metadata.requires("verl"))


def test_verl_wants_flash_attention_where_nothing_else_is_said():
    spec = importlib.util.find_spec("verl")
    with open(os.path.join(spec.submodule_search_locations[0], "workers/config/model.py")) as file:
        assert 'self.override_config.get("attn_implementation", "flash_attention_2")' in file.read()


# --- W&B ------------------------------------------------------------------------------------------


def wandb_warnings(**values):
    return check_wandb(config_with("hardware=gpu_1x1", **{"trainer.logger": ["console", "wandb"], **values})).warnings


@pytest.fixture(autouse=True)
def another_machine_may_have_the_key(monkeypatch):
    """The run joins a cluster."""
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")


@pytest.mark.bad_input
def test_without_a_key_on_the_only_machine_the_run_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(Problems, match="no key for https://api.wandb.ai .*WANDB_MODE=offline"):
        wandb_warnings()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert not wandb_warnings()


def test_a_missing_key_is_said():
    (warning,) = wandb_warnings()
    assert "WANDB_API_KEY" in warning and "WANDB_MODE=offline" in warning and "https://api.wandb.ai" in warning
    assert wandb_warnings(**{"trainer.logger": "wandb"}) and wandb_warnings(**{"trainer.logger": ["tracking"]})
    assert not wandb_warnings(**{"trainer.logger": ["console", "file"]})


@pytest.mark.parametrize(
    ("name", "value"), [("WANDB_API_KEY", "k"), ("WANDB_MODE", "offline"), ("WANDB_MODE", "disabled")]
)
def test_the_environment_and_that_of_the_run_are_looked_at(monkeypatch, name, value):
    assert not wandb_warnings(**{"ray_kwargs.ray_init.runtime_env": {"env_vars": {name: value}}})
    monkeypatch.setenv(name, value)
    assert not wandb_warnings()


def test_an_online_mode_needs_a_key(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    assert wandb_warnings()


def test_netrc_is_looked_at_for_the_host_in_use(tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    assert not wandb_warnings()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert "https://wandb.example.org" in wandb_warnings()[0]
    (tmp_path / "other").write_text("machine wandb.example.org login user password k\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "other"))
    assert not wandb_warnings()
    (tmp_path / "other").write_text("machine\n")  # cannot be read as one
    assert wandb_warnings()


@pytest.mark.parametrize("name", ["NETRC", "WANDB_CONFIG_DIR"])
def test_a_folder_of_nobodys_is_no_key(monkeypatch, name):
    monkeypatch.setenv(name, "~nosuch/x")
    (warning,) = wandb_warnings()
    assert "no key for" in warning


@pytest.mark.bad_input
@pytest.mark.parametrize("value", [5, "http://[::1", "wandb.example.org"])
def test_an_address_that_is_none_is_refused_by_name(value):
    with pytest.raises(Problems, match="WANDB_BASE_URL=.*https://api.wandb.ai"):
        wandb_warnings(**{"ray_kwargs.ray_init.runtime_env": {"env_vars": {"WANDB_BASE_URL": value}}})


@pytest.mark.bad_input
def test_an_environment_that_is_no_mapping_is_refused_by_name():
    with pytest.raises(Problems, match="runtime_env.env_vars='foo'"):
        wandb_warnings(**{"ray_kwargs.ray_init.runtime_env": {"env_vars": "foo"}})


@pytest.mark.parametrize("folder", [".config/wandb", "wandb"])
@pytest.mark.parametrize("line", ["mode = offline", "api_key = k"])
def test_wandbs_settings_are_looked_at(tmp_path, folder, line):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "settings").write_text(f"[default]\n{line}\n")
    assert not wandb_warnings()
    (tmp_path / folder / "settings").write_text("no section\n")
    assert wandb_warnings()


# --- versions -------------------------------------------------------------------------------------


def test_other_versions_of_ray_and_vllm_are_warned_of_on_a_gpu(monkeypatch):
    seen = {"verl": "0.9.1", "ray": "2.55.1", "vllm": "0.25.0+cu130", "TransferQueue": "0.1.11"}
    monkeypatch.setattr(versions, "version", seen.__getitem__)
    config = OmegaConf.create({"trainer": {"device": "cuda"}})
    ray, vllm = _versions(config).warnings
    assert "ray: seen 2.55.1, tried was 2.60" in ray and "vllm: seen 0.25.0, tried was 0.24.0" in vllm
    seen.update(ray="2.60.3", vllm="0.24.0+cu130")
    assert _versions(config).warnings == ()
    seen.update(ray="2.6", TransferQueue="0.1.12")
    assert len(_versions(config).warnings) == 2


def test_an_engine_that_is_not_there_is_not_warned_of(monkeypatch):
    def version(package):
        if package == "vllm":
            raise metadata.PackageNotFoundError(package)
        return {"ray": "2.60.0"}.get(package, "0.1.11")

    monkeypatch.setattr(versions, "version", version)
    assert versions.version_warnings("cuda") == ()


# --- folders --------------------------------------------------------------------------------------


def test_the_users_home_is_meant_by_a_tilde(tmp_path, monkeypatch):
    """Those who write to the folder would make one that is called `~`."""
    started = []
    for name in ("check_inputs", "check_with_verl"):
        monkeypatch.setattr(main_ppo, name, lambda *_: {})
    monkeypatch.setattr(main_ppo, "ensure_tiny", lambda mix: None)
    monkeypatch.setattr(main_ppo, "activate_cpu_platform", lambda config: None)
    monkeypatch.setattr(main_ppo, "_show_report", lambda folder, say: started.append(folder))
    monkeypatch.setattr(main_ppo, "_run_verl", lambda config, settings, screen: started.append(config))
    main_ppo.run(
        config_with(
            resolved=False,
            **{
                "trainer.default_local_dir": "~/runs/a", "allocation.record": "~/record",
                "data.train_files": ["~/a.parquet", "b.parquet"], "data.val_files": "~/val.parquet",
                "actor_rollout_ref.model.path": "~/model", "actor_rollout_ref.model.tokenizer_path": "~/tokenizer",
            },
        )
    )  # fmt: skip
    config, shown = started
    assert config.trainer.default_local_dir == shown == f"{tmp_path}/runs/a"
    assert config.allocation.record == f"{tmp_path}/record"
    assert config.data.train_files == [f"{tmp_path}/a.parquet", "b.parquet"]
    assert config.data.val_files == f"{tmp_path}/val.parquet"
    model = config.actor_rollout_ref.model
    assert (model.path, model.tokenizer_path) == (f"{tmp_path}/model", f"{tmp_path}/tokenizer")
    # what refers to the model's path
    assert config.actor_rollout_ref.rollout.prometheus.served_model_name == model.path


def test_a_comparison_looks_for_its_runs_where_they_write(tmp_path, monkeypatch):
    looked_in, written = [], []
    monkeypatch.setattr(compare, "find", lambda root, patterns: looked_in.append(root) or [tmp_path])
    monkeypatch.setattr(compare, "build", lambda folders, output, *_: written.append(output) or {"sentences": []})
    with initialize_config_module("verl_ext.configs", version_base=None):
        config = compose("compare", overrides=["run=false", "recipes=[]", "root='~/runs'"])
    assert compare.run(config) == 0
    assert looked_in[-1] == tmp_path / "runs" and written == [tmp_path / "runs" / "report"]
