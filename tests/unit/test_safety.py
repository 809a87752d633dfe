"""Files' permissions, paths that lead elsewhere, credentials in what is saved or shown, and nothing unpickled."""

import ast
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

import verl_ext
from verl_ext.allocation.state import StateError, load_state, save_state
from verl_ext.cpu import activate
from verl_ext.cpu import version_alias as alias
from verl_ext.files import UnsafePathError, inside, own_folder, private_folder, restrict_umask, write_whole
from verl_ext.launch.comparison_plan import PlannedRun, check_same, write_note
from verl_ext.masking import MASK, is_secret, masked, masked_override
from verl_ext.runs.folder import RunFolder

PACKAGE = Path(verl_ext.__file__).parent


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def umask():
    """Sets it; puts the old one back."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


# ------------------------------------------------ permissions


@pytest.mark.parametrize(("given", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0, 0o664, 0o775)])
def test_a_runs_folder_respects_the_umask_and_is_never_writable_by_everybody(
    tmp_path, umask, monkeypatch, given, file, folder
):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    umask(given)
    restrict_umask()
    run = RunFolder(str(tmp_path / "run"), OmegaConf.create({"a": 1}))
    run.begin(0)
    run.add_ledger_line({"step": 1})
    assert mode(tmp_path / "run") == folder
    files = [path for path in (tmp_path / "run").iterdir() if path.is_file()]
    assert {path.name for path in files} >= {"config.yaml", "run.json", "ledger.jsonl"}
    assert {mode(path) for path in files} == {file}


@pytest.mark.parametrize("given", [0, 0o022, 0o077])
def test_the_rules_state_which_holds_answers_is_its_owners_alone(tmp_path, umask, given):
    umask(given)
    save_state(tmp_path / "step" / "allocation", {"a": np.arange(3), "b": 1})
    folder = tmp_path / "step" / "allocation"
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.iterdir()} == {0o600}
    assert load_state(folder)["b"] == 1


def test_a_umask_that_takes_away_more_is_left(umask):
    for given, left in ((0o077, 0o077), (0o022, 0o022), (0, 0o002)):
        umask(given)
        restrict_umask()
        assert umask(0o022) == left


def test_the_log_of_a_compared_run_is_private(tmp_path, umask):
    from verl_ext.launch.local_runs import SHOWN, run_all

    umask(0o022)
    run = PlannedRun("cpu/sara", 0, tmp_path / "runs" / "one")
    run_all([run], lambda line: None, command=("true",))
    assert mode(run.folder / SHOWN) == 0o600


def test_no_mode_in_the_code_lets_everybody_write():
    for path, node in nodes():
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", "")
        assert called not in ("chmod", "fchmod", "mktemp"), f"{path}:{node.lineno}: the umask says what may be done"
        if called in ("mkdir", "makedirs", "open"):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            numbers = [value.value for value in values if isinstance(value, ast.Constant) and type(value.value) is int]
            assert not any(number & 0o002 for number in numbers), f"{path}:{node.lineno}"


# ------------------------------------------------ paths


@pytest.mark.parametrize("name", ["../elsewhere.npz", "/etc/hostname", "", ".", "..", "a/b", None, 3, "a\0b"])
def test_a_name_read_from_a_file_does_not_lead_out_of_its_folder(tmp_path, name):
    with pytest.raises(UnsafePathError):
        inside(tmp_path, name)


@pytest.mark.bad_input
def test_a_state_file_that_names_another_folders_arrays_is_refused(tmp_path):
    other = save_state(tmp_path / "other", {"a": np.arange(3)}).parent
    mine = save_state(tmp_path / "mine", {"a": np.arange(3)}).parent
    document = json.loads((mine / "allocation.json").read_text())
    document["arrays"] = f"../other/{document['arrays']}"
    (mine / "allocation.json").write_text(json.dumps(document))
    with pytest.raises(StateError, match="no name of a file in"):
        load_state(mine)
    assert load_state(other)


@pytest.mark.parametrize("which", ["allocation.json", "arrays"])
def test_a_link_in_the_place_of_a_state_file_is_not_followed(tmp_path, which):
    folder = save_state(tmp_path / "step", {"a": np.arange(3)}).parent
    name = which if which != "arrays" else json.loads((folder / "allocation.json").read_text())["arrays"]
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(StateError, match="is a link"):
        load_state(folder)
    # Saving puts a file in the link's place, and leaves alone what it led to.
    before = (tmp_path / "outside").read_bytes()
    save_state(folder, {"a": np.arange(3)})
    assert (tmp_path / "outside").read_bytes() == before and load_state(folder)["a"].tolist() == [0, 1, 2]


def test_a_waiting_rollouts_file_is_taken_from_its_folder_only(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save

    from verl_ext.training.waiting_rows import load_rows

    payload = save({"a/values": torch.zeros(1)})
    (tmp_path / "outside.safetensors").write_bytes(payload)
    (tmp_path / "step").mkdir()
    row = {"key": "u_0_0", "tag": {}, "prompt": 0, "fields": {}}
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), None):
        with pytest.raises(StateError, match="no name of a file in"):
            load_rows(tmp_path / "step", {"rows": [row], "file": name}, lambda row: {}, "train")


def test_links_in_a_runs_folder_are_not_written_through(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.yaml", "run.json", ".config.yaml.tmp", f".config.yaml.{os.getpid()}.tmp", "ledger.jsonl"):
        (folder / name).symlink_to(outside)
    run = RunFolder(str(folder), OmegaConf.create({"a": 1}))
    with pytest.raises(OSError):
        run.add_ledger_line({"step": 1})
    run.begin(0)
    assert not (folder / "config.yaml").is_symlink()
    run.add_ledger_line({"step": 1})
    assert outside.read_text() == "mine\n" and (folder / "ledger.jsonl").read_text() == '{"step": 1}\n'


def test_a_private_folder_is_no_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafePathError, match="is a link"):
        private_folder(tmp_path / "link")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == b"old"


def test_a_folder_on_the_path_of_python_that_others_can_write_to_is_refused(tmp_path, monkeypatch):
    """What lies there would be imported by every process of the run."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(alias, "alias_version", lambda: "0.28.0+cpu")
    for name in ("PYTHONPATH", "VERL_PLATFORM"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    folder = alias._default_folder()
    folder.parent.mkdir()
    folder.parent.chmod(0o777)
    with pytest.raises(UnsafePathError, match="777.*remove it, or set TMPDIR"):
        alias.install_alias()
    monkeypatch.delitem(__import__("sys").modules, "verl", raising=False)
    with pytest.raises(activate.CpuPlatformError, match="TMPDIR"):
        activate.activate_cpu_platform()
    folder.parent.chmod(0o700)
    folder.mkdir(mode=0o700)
    assert own_folder(folder) == folder
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(UnsafePathError, match="belongs to user"):
        own_folder(folder)


# ------------------------------------------------ credentials

SECRET = "s3cret-value"
NAMES = [
    "api_key", "WANDB_API_KEY", "openai.api-key", "apiKey", "AWS_SECRET_ACCESS_KEY", "password", "db_passwd", "token",
    "HF_TOKEN", "hf_token", "access_token", "githubToken", "client_secret", "credentials", "private_key",
    "AWS_ACCESS_KEY_ID",
]  # fmt: skip
HARMLESS = [
    "max_token_len", "ppo_max_token_len_per_gpu", "max_num_batched_tokens", "pad_token", "eos_token", "prompt_key",
    "reward_fn_key", "tokenizer", "tokenizer_path", "key", "token2text", "skip_tokenizer_init", "image_key", "passes",
    "token_level_scores", "loss_agg_mode", "key_metrics", "author", "path", "pattern",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_credentials(name):
    assert is_secret(name) and masked({name: SECRET}) == {name: MASK}


@pytest.mark.parametrize("name", HARMLESS)
def test_names_that_only_sound_like_it(name):
    assert not is_secret(name) and masked({name: "text"}) == {name: "text"}


def test_no_setting_of_the_whole_configuration_is_masked():
    from tests.unit.checks.check_configs import config_with

    config = OmegaConf.to_container(config_with(resolved=False), resolve=False)
    assert masked(config) == config


def test_what_is_no_text_is_left():
    given = {"token": 3, "password": None, "api_key": "", "secret": [1, 2], "n": 1.5, "on": True}
    assert masked(given) == given


def test_variables_of_the_environment_are_looked_at_more_strictly():
    given = {"runtime_env": {"env_vars": {"SOME_KEY": SECRET, "MY_SERVICE_TOKEN": SECRET, "NCCL_DEBUG": "WARN"}}}
    variables = masked(given)["runtime_env"]["env_vars"]
    assert variables == {"SOME_KEY": MASK, "MY_SERVICE_TOKEN": MASK, "NCCL_DEBUG": "WARN"}


def test_passwords_in_urls_are_masked_and_the_rest_is_kept():
    given = {"proxy": f"http://me:{SECRET}@proxy.example:8080/x", "path": "hdfs://node:9000/a@b", "list": [f"s3://a:{SECRET}@b"]}
    shown = masked(given)
    assert shown["proxy"] == f"http://me:{MASK}@proxy.example:8080/x" and shown["path"] == given["path"]
    assert SECRET not in str(shown)


def test_overrides_are_masked():
    for override in (f"+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY={SECRET}", f"++a.hf_token={SECRET}",
                     f"+ray_kwargs.ray_init.runtime_env.env_vars={{SOME_KEY:{SECRET},A:b}}",
                     f"+proxy=http://me:{SECRET}@host"):  # fmt: skip
        assert SECRET not in masked_override(override) and MASK in masked_override(override)
        assert masked_override(override).startswith(override.split("=")[0])
    for override in ("trainer.nnodes=2", "recipe=cpu/sara", "~trainer.logger", "data.max_token_len=7", "+a.token=null"):
        assert masked_override(override) == override


def test_nothing_of_a_credential_is_in_a_runs_folder_or_in_the_report(tmp_path, monkeypatch):
    from verl_ext.compare import build

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    folders = []
    for number in (0, 1):
        overrides = (f"+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY={SECRET}{number}",)
        run = PlannedRun(f"cpu/rule{number}", number, tmp_path / "runs" / str(number), overrides)
        config = {"trainer": {"experiment_name": f"rule{number}", "total_training_steps": 1},
                  "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"WANDB_API_KEY": f"{SECRET}{number}"}}}},
                  "data": {"train_batch_size": 1, "reader": {"password": f"{SECRET}{number}"}}}  # fmt: skip
        RunFolder(str(run.folder), OmegaConf.create(config)).begin(0)
        write_note(run.folder, run.note())
        metrics = {"step": 1, "data": {"allocation/rollouts": 8, "val-core/x/acc/mean@8": 0.5}}
        (run.folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
        assert SECRET in run.arguments()[-1]
        check_same(run)
        folders.append(run.folder)
    # A folder of another origin, saved whole: the report masks what it reads, too.
    foreign = yaml.safe_load((folders[0] / "config.yaml").read_text())
    foreign["data"]["reader"]["password"] = SECRET
    (folders[0] / "config.yaml").write_text(yaml.safe_dump(foreign))
    build(folders, tmp_path / "report", "title")
    for path in [*(tmp_path / "report").rglob("*"), *folders[1].rglob("*"), folders[0] / "compare.json"]:
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    assert yaml.safe_load((folders[1] / "config.yaml").read_text())["data"]["train_batch_size"] == 1


# ------------------------------------------------ nothing is unpickled


def nodes():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path.relative_to(PACKAGE.parent), node


UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle", "_pickle"}
UNSAFE_CALLS = {"torch.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "pd.read_pickle",
                "pandas.read_pickle", "eval", "exec", "np.fromfile", "os.system"}  # fmt: skip


def unsafe(source):
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in modules if name.split(".")[0] in UNSAFE_MODULES]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called in UNSAFE_CALLS or arguments.get("allow_pickle") == "True" or arguments.get("shell") == "True":
                found.append(called)
            if called in ("np.load", "numpy.load") and arguments.get("allow_pickle") != "False":
                found.append(f"{called} without allow_pickle=False")
    return found


def test_nothing_of_ours_is_unpickled_or_run_as_code():
    found = {str(path): bad for path in PACKAGE.rglob("*.py") if (bad := unsafe(path.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize("source", ["import pickle", "from dill import loads", "torch.load(f)", "np.load(f)",
                                    "np.load(f, allow_pickle=True)", "yaml.load(f)", "eval(x)",
                                    "subprocess.run(x, shell=True)"])  # fmt: skip
def test_the_test_above_sees_what_is_unsafe(source):
    assert unsafe(source)
