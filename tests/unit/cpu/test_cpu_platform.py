# SPDX-License-Identifier: Apache-2.0
"""The CPU platform: inert unless asked for, clear errors, the version alias, cleaning up. No Ray, no vLLM engine."""

import os
import subprocess
import sys
import textwrap
import time
from importlib import metadata

import psutil
import pytest
from omegaconf import OmegaConf

from verl_ext.checks import versions
from verl_ext.cpu import activate
from verl_ext.cpu import version_alias as alias
from verl_ext.launch import cleanup


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter: what is imported and registered there is then its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VERL_", "VLLM_"))}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def clean_environment(monkeypatch):
    """No variable of the platform set, and whatever a test sets is undone."""
    for key in (*activate.cpu_environment(), "PYTHONPATH"):
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return monkeypatch


# --- inert unless asked for -----------------------------------------------------------------------


def test_importing_the_package_loads_neither_verl_nor_torch_nor_ray():
    done = run_python(
        """
        import sys, os
        before = dict(os.environ)
        import verl_ext.cpu, verl_ext.cpu.vllm_linear, verl_ext.cpu.plugin, verl_ext.cpu.patches
        print([name for name in ("verl", "torch", "ray", "vllm", "transformers") if name in sys.modules])
        print(dict(os.environ) == before)
        """
    )
    assert done.stdout.split("\n")[:2] == ["[]", "True"], done.stderr


def test_vllm_plugin_does_nothing_unless_asked_for():
    done = run_python(
        """
        import sys
        from verl_ext.cpu.vllm_linear import register
        register()
        print("vllm" in sys.modules, "torch" in sys.modules)
        """
    )
    assert done.stdout.strip() == "False False", done.stderr


def test_refused_where_an_accelerator_is_visible(clean_environment):
    import torch

    clean_environment.setattr(torch.cuda, "is_available", lambda: True)
    before = dict(os.environ)
    with pytest.raises(activate.CpuPlatformError, match=r"trainer\.device=cpu.*hardware=gpu.*CUDA_VISIBLE_DEVICES"):
        activate.refuse_accelerator()
    # Whether verl is loaded in this process or not, nothing is set.
    with pytest.raises(activate.CpuPlatformError):
        activate.activate_cpu_platform()
    assert dict(os.environ) == before


def test_refused_after_verl_was_imported(clean_environment):
    clean_environment.setitem(sys.modules, "verl", sys)
    with pytest.raises(activate.CpuPlatformError, match="before verl is imported"):
        activate.activate_cpu_platform()


# --- what a run's processes get -------------------------------------------------------------------


def test_environment_reaches_this_process_and_rays_workers(clean_environment):
    clean_environment.delitem(sys.modules, "verl", raising=False)
    clean_environment.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    clean_environment.setenv("VERL_USE_EXTERNAL_MODULES", "my.module")
    config = OmegaConf.create({"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"HF_HUB_OFFLINE": "0"}}}}})
    OmegaConf.set_struct(config, True)
    done = activate.activate_cpu_platform(config)
    env_vars = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert os.environ["VERL_PLATFORM"] == env_vars["VERL_PLATFORM"] == done["VERL_PLATFORM"] == "cpu"
    # The user's own choices win, and a module of the user's is kept.
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == env_vars["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert env_vars["HF_HUB_OFFLINE"] == "0"
    assert os.environ["VERL_USE_EXTERNAL_MODULES"] == "my.module," + activate.PLUGIN_MODULE
    assert all(isinstance(value, str) for value in env_vars.values())
    # A second call changes nothing.
    assert activate.activate_cpu_platform(config) == done


# --- versions -------------------------------------------------------------------------------------


def test_installed_versions_pass():
    versions.check_versions("cpu")


@pytest.mark.parametrize(
    ("installed", "device", "named"),
    [
        ({"verl": "0.9.0"}, "cuda", ["verl: seen 0.9.0, needed 0.9.1"]),
        ({"verl": None}, "cuda", ["verl: seen not installed, needed 0.9.1"]),
        (
            {"torch": "2.11.0+cpu", "vllm-cpu": None},
            "cpu",
            ["torch: seen 2.11.0+cpu, needed 2.13.0", "vllm-cpu: seen not installed, needed 0.28.0"],
        ),
    ],
)
def test_other_versions_are_named(monkeypatch, installed, device, named):
    good = {**versions.REQUIRED, **versions.REQUIRED_ON_CPU}

    def version(package):
        seen = {**good, **installed}[package]
        if seen is None:
            raise metadata.PackageNotFoundError(package)
        return seen

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(versions.VersionError) as error:
        versions.check_versions(device)
    assert all(text in str(error.value) for text in named)
    assert f"verl=={versions.REQUIRED['verl']}" in str(error.value)


def test_vllms_cpu_build_is_not_needed_on_an_accelerator(monkeypatch):
    asked = []
    monkeypatch.setattr(versions, "version", lambda package: asked.append(package) or versions.REQUIRED[package])
    versions.check_versions("cuda")
    assert asked == list(versions.REQUIRED)


# --- the alias of vLLM's distribution -------------------------------------------------------------


def test_alias_answers_in_this_process_and_in_its_children(clean_environment, tmp_path):
    if alias.alias_version() is None:
        pytest.skip("vllm itself is installed: no alias is needed")
    folder = alias.install_alias(tmp_path)
    want = metadata.version("vllm-cpu").split("+")[0] + "+cpu"
    assert folder == str(tmp_path)
    assert metadata.version("vllm") == want
    # vLLM reads its optional requirements from there too.
    assert metadata.requires("vllm") == metadata.requires("vllm-cpu")
    child = subprocess.run(
        [sys.executable, "-c", "from importlib.metadata import version; print(version('vllm'))"],
        capture_output=True,
        text=True,
    )
    assert child.stdout.strip() == want
    # Once is enough.
    assert alias.install_alias(tmp_path) == folder
    assert os.environ["PYTHONPATH"].split(os.pathsep).count(folder) == sys.path.count(folder) == 1


def test_no_alias_where_vllm_itself_is_installed(clean_environment, tmp_path):
    info = tmp_path / "site" / "vllm-0.24.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n")
    clean_environment.syspath_prepend(str(tmp_path / "site"))
    assert alias.alias_version() is None
    assert alias.install_alias(tmp_path / "alias") is None
    assert not (tmp_path / "alias").exists() and "PYTHONPATH" not in os.environ


# --- cleaning up ----------------------------------------------------------------------------------

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")

SLEEPER = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.{}); print('up', flush=True); time.sleep(300)"


def start_sleeper(on_sigterm: str = "SIG_DFL", **environment: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER.format(on_sigterm)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    process.stdout.readline()
    return process


def wait_until_gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process that is no child of ours has ended (a zombie counts as ended)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@needs_proc
def test_only_the_runs_own_processes_are_ended():
    mine = start_sleeper(**{cleanup.RUN_ID: "run-a"})
    stubborn = start_sleeper("SIG_IGN", **{cleanup.RUN_ID: "run-a"})
    other = start_sleeper(**{cleanup.RUN_ID: "run-ab"})
    unmarked = start_sleeper()
    try:
        assert sorted(cleanup.run_processes("run-a")) == sorted([mine.pid, stubborn.pid])
        assert cleanup.end_run_processes("run-a", grace_s=0.5) == sorted([mine.pid, stubborn.pid])
        assert mine.wait(5) != 0 and stubborn.wait(5) != 0
        assert other.poll() is None and unmarked.poll() is None
    finally:
        for process in (mine, stubborn, other, unmarked):
            process.kill()
            process.wait()


DRIVER = """
    import subprocess, sys, time
    from verl_ext.launch.cleanup import run_guard
    with run_guard():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        print(child.pid, flush=True)
        {body}
    """


@needs_proc
@pytest.mark.parametrize(
    ("body", "sent", "status"),
    [
        ("raise RuntimeError('failed start')", None, 1),
        ("time.sleep(300)", "SIGINT", None),
        ("time.sleep(300)", "SIGTERM", 143),
        ("time.sleep(300)", "SIGKILL", -9),
    ],
)
def test_nothing_is_left_however_the_run_ends(body, sent, status):
    import signal

    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER.format(body=body))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Tests that run in a shell's background inherit an ignored SIGINT, and Python then raises no KeyboardInterrupt.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    child = int(driver.stdout.readline())
    if sent is not None:
        driver.send_signal(getattr(signal, sent))
    seen = driver.wait(30)
    assert status is None or seen == status
    assert wait_until_gone(child)


@needs_proc
def test_the_watcher_outlives_a_signal_to_all_processes():
    """`ray job stop` and Slurm send SIGTERM to every process, the watcher too, and kill the run if it does not end."""
    import signal

    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER.format(body="time.sleep(300)"))],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    child = int(driver.stdout.readline())
    [watcher] = [p for p in psutil.Process(driver.pid).children() if cleanup.__file__ in p.cmdline()]
    time.sleep(0.5)  # it has begun
    watcher.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    driver.kill()
    driver.wait(30)
    assert wait_until_gone(child)
