"""docs/upstream.md says what the code does; what is overridden or replaced has a reason and a contract test."""

from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("verl.trainer.ppo.v1.trainer_base")
from scripts import write_upstream_table as upstream  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


@cache
def rows():
    tests = upstream.contract_tests(ROOT)
    return upstream.replaced(ROOT, tests), upstream.overridden(ROOT, tests)


def test_the_document_is_fresh():
    text = upstream.document(ROOT)
    assert (ROOT / upstream.DOCUMENT).read_text() == text, "stale: run python -m scripts.write_upstream_table"


def test_the_rows_known_to_be_there_are_found():
    replaced, overridden = rows()
    assert {"ray.init", "verl.utils.model.load_valuehead_model"} <= {row.theirs for row in replaced}
    names = {row.theirs.rpartition(".")[2] for row in overridden}
    assert {"PlatformBase", "_update_actor", "sample", "_run_prompt", "generate", "_acquire_server"} <= names
    entry_points = {name for _, where, name in upstream.registered(ROOT) if where.startswith("entry point")}
    assert entry_points == {"verl_ext", "verl_ext_cpu"}


def test_every_row_has_a_reason_and_a_version():
    for row in rows()[0] + rows()[1]:
        assert len(row.why) > 20, f"{row.ours} replaces or overrides {row.theirs}: say why in its docstring"
        assert row.version.split()[0].split("-")[0] in upstream.PACKAGES and len(row.version.split()) == 2, row


def test_every_row_is_guarded_by_a_contract_test():
    """But constructors, which pass everything on."""
    unguarded = [row.theirs for row in rows()[0] + rows()[1] if not row.guards and not row.theirs.endswith("__init__")]
    assert unguarded == []


def test_whoever_assigns_to_a_module_of_theirs_says_what_it_replaces():
    found = upstream.assignments(ROOT)
    assert "verl_ext.cpu.patches.single_gloo_backend" in dict(found)
    assert [name for name, says in found if not says] == []


def test_an_undeclared_assignment_is_seen(tmp_path):
    (tmp_path / "verl_ext").mkdir()
    (tmp_path / "verl_ext" / "patch.py").write_text(
        "def quiet():\n    from verl.utils import tracking\n    tracking.Tracking = None\n"
        "def mine():\n    from elsewhere import tracking\n    tracking.Tracking = None\n"
    )
    assert upstream.assignments(tmp_path) == [("verl_ext.patch.quiet", False)]


def test_the_command_says_when_the_document_is_stale(tmp_path, capsys, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests" / "contract").mkdir(parents=True)
    monkeypatch.setattr(upstream, "document", lambda root: "as it should be\n")
    assert upstream.main(["--root", str(tmp_path), "--check"]) == 1
    assert upstream.main(["--root", str(tmp_path)]) == 0
    assert upstream.main(["--root", str(tmp_path), "--check"]) == 0
    with pytest.raises(SystemExit):
        upstream.main(["--root", str(tmp_path / "docs")])
