# SPDX-License-Identifier: Apache-2.0
"""Nothing of a credential in a run's configuration reaches the log or a logging service, with verl's own code."""

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl.trainer.main_ppo")
from verl.trainer import main_ppo  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base  # noqa: E402

CONFIG = {
    "trainer": {"wandb_proxy": "http://me:s3cret-proxy@proxy:8080", "project_name": "p", "max_token_len": 7},
    "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"WANDB_API_KEY": "s3cret-wandb", "HF_TOKEN": "s3cret2"}}}},
}  # fmt: skip


@pytest.fixture
def hidden(monkeypatch):
    from verl_ext.training.task_runner import hide_credentials

    monkeypatch.setattr(main_ppo, "pprint", main_ppo.pprint)
    monkeypatch.setattr(trainer_base, "Tracking", trainer_base.Tracking)
    hide_credentials()


def test_verls_task_runner_still_prints_by_this_name_and_verls_trainer_still_tracks_by_that():
    import inspect

    run = inspect.getsource(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class.__ray_actor_class__.run)
    assert "pprint(OmegaConf.to_container(config, resolve=True))" in run
    fit = inspect.getsource(trainer_base.PPOTrainer.fit)
    assert "self.logger = Tracking(" in fit and "config=OmegaConf.to_container(self.config, resolve=True)" in fit


def test_the_configuration_is_printed_without_them(hidden, capsys):
    main_ppo.pprint(CONFIG)
    printed = capsys.readouterr().out
    assert "s3cret" not in printed and "WANDB_API_KEY" in printed and "'max_token_len': 7" in printed


def test_logging_services_get_the_configuration_without_them(hidden, monkeypatch):
    seen = {}

    class Wandb:
        @staticmethod
        def setup(settings):
            seen.update(proxy=settings.https_proxy)

        @staticmethod
        def init(config, settings, **kwargs):
            # Settings of its own win over those of `setup`.
            seen.update({"config": config} | ({"proxy": settings.https_proxy} if settings else {}))

        @staticmethod
        def finish(exit_code):
            """Called at the interpreter's end."""

        class Settings:
            def __init__(self, https_proxy):
                self.https_proxy = https_proxy

    monkeypatch.setitem(__import__("sys").modules, "wandb", Wandb)
    tracking = trainer_base.Tracking("p", "e", default_backend=["wandb"], config=CONFIG)
    assert "s3cret" not in str(seen["config"])
    assert seen["config"]["trainer"]["max_token_len"] == 7
    # Not shown, but used.
    assert seen["proxy"] == CONFIG["trainer"]["wandb_proxy"]
    tracking.finish()
    open_proxy = {"trainer": {"wandb_proxy": "http://proxy:8080"}}
    trainer_base.Tracking("p", "e", default_backend="wandb", config=open_proxy).finish()
    assert seen["config"] == open_proxy and seen["proxy"] == "http://proxy:8080"


def test_a_proxy_is_not_set_where_wandb_is_not_a_logger(hidden, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # importing it would raise
    trainer_base.Tracking("p", "e", default_backend=["console"], config=CONFIG).finish()


def test_ray_is_started_as_verl_would_and_nothing_is_printed(monkeypatch, capsys):
    """verl's own `run_ppo` up to its `ray.init`, and ours, are given the same arguments."""
    import ray
    from hydra import compose, initialize_config_module

    import verl_ext.main_ppo  # noqa: F401
    from verl_ext.launch.ray_start import start_ray

    with initialize_config_module("verl_ext.configs", version_base=None):
        config = compose("main", overrides=["recipe=cpu/sara"])
    OmegaConf.set_struct(config, False)
    config.ray_kwargs.ray_init.runtime_env = {"env_vars": {"WANDB_API_KEY": "s3cret"}}
    config.transfer_queue.enable = True
    calls = []

    class Started(BaseException):
        pass

    def init(**kwargs):
        calls.append(kwargs)
        raise Started

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Started):
        start_ray(config)
    assert "s3cret" not in capsys.readouterr().out
    with pytest.raises(Started):
        main_ppo.run_ppo(config, main_ppo.TaskRunnerV1)
    assert calls[0] == calls[1] and calls[0]["runtime_env"]["env_vars"]["WANDB_API_KEY"] == "s3cret"


@pytest.mark.parametrize("address, said", [
    ("127.0.0.1:1", "Ray at 127.0.0.1:1 is not reached: .*ray start --head.*address=local"),
    ("local", "Ray does not start on this machine: no room; .*ray stop"),
])  # fmt: skip
def test_a_ray_that_does_not_come_up_is_one_line(monkeypatch, address, said):
    import ray
    from hydra import compose, initialize_config_module

    import verl_ext.main_ppo  # noqa: F401
    from verl_ext.launch import ray_start
    from verl_ext.launch.join_cluster import ClusterError

    def init(**kwargs):
        raise RuntimeError("no room\n")

    with initialize_config_module("verl_ext.configs", version_base=None):
        config = compose("main", overrides=["recipe=cpu/sara", f"++ray_kwargs.ray_init.address={address}"])
    OmegaConf.set_struct(config, False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_start, "_HEAD_WITHIN_S", 0.5)
    with pytest.raises(ClusterError, match=said) as error:
        ray_start.start_ray(config)
    assert "\n" not in str(error.value)
