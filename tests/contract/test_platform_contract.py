# SPDX-License-Identifier: Apache-2.0
"""What the CPU platform relies on in verl 0.9.1 and vLLM 0.28.0: a test here fails when an upgrade changes it.

Source is read without being imported where that suffices; what must be run is run in a fresh interpreter, because a
process chooses its platform once.
"""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

import verl_ext
from verl_ext.cpu import activate
from verl_ext.cpu import version_alias as alias
from verl_ext.launch import cleanup

PATCHED = "_verl_ext_patched"


def folder(package: str) -> Path:
    return Path(importlib.util.find_spec(package).submodule_search_locations[0])


@cache
def source(package: str, path: str) -> str:
    return (folder(package) / path).read_text(encoding="utf-8")


def function(package: str, path: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The definition of a function or method ("Class.method") in a source file."""
    node: ast.AST = ast.parse(source(package, path))
    for part in name.split("."):
        found = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part]
        assert found, f"{package}/{path} no longer defines {name}"
        node = found[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node


def parameters(package: str, path: str, name: str) -> list[str]:
    return [argument.arg for argument in function(package, path, name).args.args]


def run_python(code: str, expect_failure: bool = False, **environment: str) -> str:
    """Output of code run in a fresh interpreter, in which no platform was chosen yet (errors: its messages)."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VERL_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode != 0) == expect_failure, done.stderr
    return done.stderr if expect_failure else done.stdout


def on_cpu() -> dict[str, str]:
    """The environment of a process of a run on the CPU, with the alias that a driver would have put on the path."""
    code = "import os, verl_ext.cpu as p; p.activate_cpu_platform(); print(os.environ.get('PYTHONPATH', ''))"
    return {**activate.cpu_environment(), "PYTHONPATH": run_python(code).strip().splitlines()[-1]}


# --- how the plugin is loaded ---------------------------------------------------------------------


def test_entry_points_are_installed():
    assert {(point.name, point.value) for point in entry_points(group="verl.plugins")} >= {
        ("verl_ext", activate.PLUGIN_MODULE)
    }
    assert {(point.name, point.value) for point in entry_points(group="vllm.general_plugins")} >= {
        ("verl_ext_cpu", "verl_ext.cpu.vllm_linear:register")
    }


def test_errors_in_an_external_module_propagate():
    message = run_python("import verl", expect_failure=True, VERL_USE_EXTERNAL_MODULES="no_such_module_of_ours")
    assert "no_such_module_of_ours" in message


def test_a_missing_plugin_stops_verl_loudly():
    message = run_python(
        "from verl.plugin.platform import get_platform; get_platform()",
        expect_failure=True,
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_PLUGINS="none",
    )
    assert "Unknown platform 'cpu'" in message


def test_nothing_is_registered_or_patched_unless_asked_for():
    out = run_python(
        f"""
        import verl, verl_ext.cpu.plugin
        from verl.plugin.platform import PlatformRegistry
        from verl.utils import distributed
        print("cpu" in PlatformRegistry.registered_names(),
              hasattr(distributed.initialize_global_process_group_ray, "{PATCHED}"))
        """
    )
    assert out.split()[-2:] == ["False", "False"]


# --- Ray -----------------------------------------------------------------------------------------------------

RAY_DRIVER = """
    import time
    from verl_ext.launch import cleanup
    with cleanup.run_guard() as run_id:
        import ray
        ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")

        @ray.remote
        class Actor:
            def sleep(self):
                # What vLLM does: a process in a session of its own, which nobody waits for.
                import subprocess, sys
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
                time.sleep(300)

        actor = Actor.remote()
        waiting = actor.sleep.remote()
        while len(cleanup.run_processes(run_id)) < 4:
            time.sleep(0.1)
        time.sleep(2)
        print("RUN", run_id, flush=True)
        ray.get(waiting)
    """


@pytest.mark.ray
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
def test_sigterm_unwinds_a_run_on_ray_and_leaves_nothing():
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RAY_DRIVER)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run_id = next(line.split()[1] for line in driver.stdout if line.startswith("RUN "))
    # Ray's and the orphan: the mark reaches what a Ray worker starts, and titles do not hide it.
    titles = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in cleanup.run_processes(run_id)]
    assert any(b"ray::Actor" in title for title in titles)
    assert sum(b"time.sleep(300)" in title for title in titles) >= 1
    driver.terminate()
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == 143, errors
    assert cleanup.run_processes(run_id) == []


# --- verl: the platform and its patches -----------------------------------------------------------

# On accelerators only: overlapping copies (activation offload), fused kernels, other checkpoint engines.
NOT_ON_CPU = {"Stream", "Event", "stream", "current_stream"}


def test_platform_and_patches_in_a_process_of_a_run():
    """One fresh process answers all questions that need verl imported (seven seconds a process)."""
    out = run_python(
        """
        import inspect, json, sys
        import torch, verl
        from verl.plugin.platform import PlatformBase, get_platform
        from verl.utils import distributed
        platform, answer = get_platform(), {}
        answer["platform"] = type(platform).__name__
        answer["device"] = [platform.device_name, platform.ray_resource_name(), platform.communication_backend_name()]
        # Every method of verl's interface exists here with the same parameters.
        answer["differs"] = [
            name for name, member in inspect.getmembers(PlatformBase, inspect.isfunction)
            if list(inspect.signature(member).parameters)
            != list(inspect.signature(inspect.getattr_static(type(platform), name)
                                      if name != "check_smi_command" else member).parameters)
        ]
        answer["module"] = sorted(vars(platform.device_module))
        free, total = platform.device_module.mem_get_info()
        answer["memory"] = 0 < free <= total and platform.device_module.max_memory_allocated() > 0
        # The process group: torch refuses what verl would ask for, and takes what the patch asks for.
        try:
            torch.distributed.distributed_c10d.BackendConfig(torch.distributed.Backend("cpu:gloo,cpu:gloo"))
            answer["twice"] = "accepted"
        except ValueError as error:
            answer["twice"] = "refused"
        import os
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        distributed.initialize_global_process_group_ray(timeout_second=None)
        tensor = torch.ones(2)
        torch.distributed.all_reduce(tensor)
        answer["reduced"] = tensor.tolist()
        # Nothing heavy came with the plugin; the Ascend engine did not bring vLLM in.
        answer["light"] = "verl.utils.model" not in sys.modules
        import verl.checkpoint_engine as engines
        answer["hccl"] = [engines.HCCLCheckpointEngine is None, "vllm" in sys.modules]
        from verl.workers.engine import EngineRegistry
        answer["engine"] = EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__
        # The critic's model.
        import tempfile
        from transformers import Qwen2Config, Qwen2ForCausalLM
        from verl.utils.model import load_valuehead_model
        config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=1)
        with tempfile.TemporaryDirectory() as path:
            Qwen2ForCausalLM(config).save_pretrained(path)
            config.num_labels = 1
            critic = load_valuehead_model(path, torch.float32, config, False)
        answer["critic"] = [type(critic).__name__, critic.config._attn_implementation]
        print("ANSWER" + json.dumps(answer))
        """,
        **activate.cpu_environment(),
    )
    answer = json.loads(out.split("ANSWER")[1])
    module = set(answer.pop("module"))
    assert answer == {
        "platform": "PlatformCPU",
        "device": ["cpu", "GPU", "gloo"],
        "differs": [],
        "memory": True,
        "twice": "refused",
        "reduced": [1.0, 1.0],
        "light": True,
        "hccl": [True, False],
        "engine": "FSDPEngineWithLMHead",
        "critic": ["Qwen2ForTokenClassification", "sdpa"],
    }
    asked = set()
    for path in folder("verl").rglob("*.py"):
        asked.update(re.findall(r"get_torch_device\(\)\.(\w+)", path.read_text(encoding="utf-8")))
    assert asked, "verl no longer asks get_torch_device() for anything"
    assert asked - NOT_ON_CPU <= module


def test_process_group_patch_is_still_needed_and_still_fits():
    path = "utils/distributed.py"
    assert parameters("verl", path, "initialize_global_process_group_ray") == ["timeout_second", "backend"]
    assert 'backend or f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in source("verl", path)
    assert "initialize_global_process_group_ray" in source("verl", "workers/engine_workers.py")


def test_value_head_patch_is_still_needed_and_still_fits():
    node = function("verl", "utils/model.py", "load_valuehead_model")
    assert [argument.arg for argument in node.args.args] == [
        "local_path",
        "torch_dtype",
        "model_config",
        "trust_remote_code",
    ]
    text = ast.unparse(node)
    assert "flash_attention_2" in text and "AutoModelForTokenClassification" in text
    # Taken from the module when it is called, so that a patch made before is seen.
    build = ast.unparse(function("verl", "workers/engine/fsdp/transformer_impl.py", "FSDPEngine._build_module"))
    assert "from verl.utils.model import load_valuehead_model" in build


def test_ascend_engine_is_still_optional_and_still_imports_vllm():
    assert "from vllm" in source("verl", "checkpoint_engine/hccl_checkpoint_engine.py")
    assert re.search(
        r"try:\s+from \.hccl_checkpoint_engine import HCCLCheckpointEngine.*?except ImportError",
        source("verl", "checkpoint_engine/__init__.py"),
        re.DOTALL,
    )


# --- verl: what the configuration relies on -------------------------------------------------------

# Keys that verl's YAML does not list, and where verl or Ray takes them from.
ADDED = {
    "actor_rollout_ref.model.override_config.attn_implementation": ("verl", "workers/config/model.py"),
    "actor_rollout_ref.actor.fsdp_config.mixed_precision": ("verl", "workers/config/engine.py"),
    "actor_rollout_ref.ref.fsdp_config.mixed_precision": ("verl", "workers/config/engine.py"),
    "critic.fsdp.mixed_precision": ("verl", "workers/config/engine.py"),
    "critic.model.override_config.attn_implementation": ("verl", "workers/config/model.py"),
    "actor_rollout_ref.rollout.enable_sleep_mode": ("verl", "workers/config/rollout.py"),
    "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend": ("vllm", "engine/arg_utils.py"),
    "ray_kwargs.ray_init.num_gpus": ("ray", "_private/worker.py"),
    "ray_kwargs.ray_init.include_dashboard": ("ray", "_private/worker.py"),
}


def leaves(tree: dict, prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found += leaves(value, name + ".") if isinstance(value, dict) else [name]
    return found


def test_every_key_of_hardware_cpu_is_known_to_verl():
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    tree = yaml.safe_load((Path(verl_ext.__file__).parent / "configs/hardware/cpu.yaml").read_text())
    with initialize_config_dir(str(folder("verl") / "trainer" / "config"), version_base=None):
        known = leaves(OmegaConf.to_container(compose("ppo_trainer")))
    for key in leaves(tree):
        added = next((name for name in ADDED if key == name or key.startswith(name + ".")), None)
        if added is None:
            assert key in known, f"verl no longer has the setting {key}"
        else:
            package, path = ADDED[added]
            word = added.rpartition(".")[2]
            assert re.search(rf"\b{word}\b", source(package, path)), f"{package}/{path} no longer knows {word}"


def test_run_ppo_passes_the_runtime_environment_on():
    assert parameters("verl", "trainer/main_ppo.py", "run_ppo") == ["config", "task_runner_class"]
    text = source("verl", "trainer/main_ppo.py")
    assert "OmegaConf.merge(default_runtime_env, runtime_env_kwargs)" in text
    assert "ray.init(**OmegaConf.to_container(ray_init_kwargs))" in text


def test_engine_settings_override_verls_executor():
    text = source("verl", "workers/rollout/vllm_rollout/vllm_async_server.py")
    assert 0 < text.index('"distributed_executor_backend": "mp"') < text.index("**engine_kwargs,")


def test_transfer_queue_reads_its_threads_from_the_environment():
    assert 'os.environ.get("TQ_NUM_THREADS"' in source("transfer_queue", "client.py")
    assert 'os.environ.get("TQ_NUM_THREADS"' in source("transfer_queue", "storage/simple_storage.py")


# --- vLLM -----------------------------------------------------------------------------------------

needs_cpu_build = pytest.mark.skipif(alias.alias_version() is None, reason="vLLM's CPU build is not installed")


@needs_cpu_build
def test_vllm_in_a_process_of_a_run():
    out = run_python(
        """
        import json
        import torch
        from importlib.metadata import version
        from vllm import plugins
        from vllm.platforms import current_platform
        from vllm.model_executor.layers import utils
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
        from verl_ext.cpu import vllm_linear
        answer = {"version": version("vllm"), "platform": type(current_platform).__name__, "layers": {}}

        def layer_of(method):
            layer = torch.nn.Linear(64, 128, bias=False)
            layer.weight.weight_loader = "kept"
            method.process_weights_after_loading(layer)
            return layer

        # As it is: the weight is gone after loading.
        answer["loader without"] = hasattr(layer_of(UnquantizedLinearMethod()).weight, "weight_loader")
        # A process where vLLM has loaded its plugins, but not ours, is refused.
        plugins.plugins_loaded = True
        try:
            vllm_linear.check_loaded()
            answer["unloaded"] = "accepted"
        except vllm_linear.CpuPlatformError as error:
            answer["unloaded"] = "verl_ext_cpu" in str(error)
        plugins.plugins_loaded = False
        plugins.load_general_plugins()
        vllm_linear.check_loaded()
        once = utils.dispatch_cpu_unquantized_gemm
        vllm_linear.register()
        answer["once"] = utils.dispatch_cpu_unquantized_gemm is once
        # With the plugin: a live update of the weight is what the layer then computes with.
        for method in (UnquantizedLinearMethod(), UnquantizedEmbeddingMethod()):
            layer, x = layer_of(method), torch.randn(3, 64)
            kept = layer.weight.weight_loader
            with torch.no_grad():
                layer.weight.copy_(torch.randn(128, 64))
                same = torch.equal(method.apply(layer, x), torch.nn.functional.linear(x, layer.weight))
            answer["layers"][type(method).__name__] = [kept, same]
        print("ANSWER" + json.dumps(answer))
        """,
        **on_cpu(),
    )
    assert json.loads(out.split("ANSWER")[1]) == {
        "version": alias.alias_version(),
        "platform": "CpuPlatform",
        "layers": {"UnquantizedLinearMethod": ["kept", True], "UnquantizedEmbeddingMethod": ["kept", True]},
        "loader without": False,
        "unloaded": True,
        "once": True,
    }


@needs_cpu_build
def test_vllm_takes_the_in_process_worker_on_a_cpu_only_with_the_variable_set():
    rule = ast.unparse(function("vllm", "platforms/cpu.py", "CpuPlatform.check_and_update_config"))
    assert "os.environ.get('VLLM_ENABLE_V1_MULTIPROCESSING', '1') == '1'" in rule
    assert "parallel_config.distributed_executor_backend == 'uni'" in rule
    # EngineCore stays a process of its own whatever the variable says.
    assert "make_async_mp_client" in source("vllm", "v1/engine/async_llm.py")
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in source("vllm", "v1/engine/async_llm.py")
