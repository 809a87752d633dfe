# SPDX-License-Identifier: Apache-2.0
"""Settings are refused by name before anything is run, those included that are read at the end."""

import re
import sys

import pytest
from hydra import compose, initialize_config_module

from tests.unit.runs.run_folders import write_compared_run as write_run
from verl_ext import compare as command_line
from verl_ext.compare import run
from verl_ext.launch.comparison_plan import CompareError


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Run with these settings; returns what is said of them. Fails if a run was started."""
    monkeypatch.chdir(tmp_path)

    def refused(*overrides):
        with initialize_config_module("verl_ext.configs", version_base=None):
            config = compose("compare", ["recipes=[x,y]", f"root={tmp_path}/runs", *overrides])
        with pytest.raises(CompareError) as error:
            run(config, (sys.executable, "-c", "open('started', 'w')"))
        assert not (tmp_path / "started").exists()
        return str(error.value)

    return refused


@pytest.mark.bad_input
@pytest.mark.parametrize("override, message", [
    ("overrides='trainer.nnodes=2'", "overrides='trainer.nnodes=2'; accepted: a list, e.g. \"overrides=['a=b']\""),
    ("overrides='a.api_key=hidden'", "overrides='a.api_key=***'"),
    ("recipes=sara", "recipes='sara'; accepted: a list"),
    ("recipes=cpu/grpo", "recipes='cpu/grpo'; accepted: a list"),
    ("recipes=null", "recipes=None; accepted: a list"),
    ("folders=r/x", "folders='r/x'; accepted: a list"),
    ("seeds=0", "seeds=0; accepted: a list, e.g. seeds=[0,1,2]"),
    ("slurm.options='--nodes=4'", "slurm.options='--nodes=4'; accepted: a list"),
    ("overrides=[5]", "overrides: 5; accepted: texts"),
    ("folders=[5]", "folders: 5; accepted: texts"),
])  # fmt: skip
def test_what_is_no_list_is_refused(refused, override, message):
    assert message in re.sub(r"\*{3,}", "***", refused(override))


@pytest.mark.bad_input
@pytest.mark.parametrize("more", ["run=true", "run=false"])
@pytest.mark.parametrize("override, message", [
    ("target=abc", "target='abc'; accepted: null, or a number in (0, 1]"),
    ("target=1.5", "target=1.5; accepted"), ("target=true", "target=True; accepted"),
    ("baseline=z", "baseline='z'; accepted: x, y"), ("baseline=[x]", "baseline=['x']; accepted: null"),
    ("output=null", "output=None; accepted: a folder"), ("root=null", "root=None; accepted: a folder"),
    ("title=5", "title=5; accepted: null, or a text"),
    ("folders=[none*]", "folders: 'none*' matches no folder"),
])  # fmt: skip
def test_what_is_read_at_the_end_is_refused_at_the_start(refused, override, message, more):
    assert message in refused(override, more)


@pytest.mark.bad_input
@pytest.mark.parametrize("output", ["/proc/x", "file", "file/below"])
def test_a_report_folder_that_cannot_be_is_refused_at_the_start(refused, tmp_path, output):
    (tmp_path / "file").touch()
    assert re.search(rf"output='{output}': .*; accepted: a folder to write to", refused(f"output={output}"))
    write_run(tmp_path / "runs" / "x-seed0")
    assert f"output='{output}': " in refused(f"output={output}", "run=false")


@pytest.mark.bad_input
def test_the_baseline_may_be_in_a_folder_given(refused, tmp_path):
    write_run(tmp_path / "copied" / "z-seed0")
    assert "baseline='w'; accepted: x, y, z" in refused("baseline=w", "folders=[copied/*]")
    assert "launcher='pbs'" in refused("baseline=z", "folders=[copied/*]", "launcher=pbs")


@pytest.mark.bad_input
def test_a_file_that_cannot_be_written_is_no_traceback(tmp_path, monkeypatch, capsys):
    def full(config):
        raise OSError(28, "No space left on device", "index.html")

    monkeypatch.setattr(command_line, "run", full)
    monkeypatch.setattr(command_line.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(command_line, "restrict_umask", lambda: None)
    with pytest.raises(SystemExit) as ended:
        command_line.main.__wrapped__(None)
    assert ended.value.code == 2
    assert "verl_ext.compare: [Errno 28] No space left on device: 'index.html'" in capsys.readouterr().err
