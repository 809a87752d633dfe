"""Rules by name, from outside packages too, and errors that say what would be right."""

from dataclasses import dataclass

import pytest

from verl_ext.allocation import SettingError, make_allocator, make_downsampler, make_selector, register_selector
from verl_ext.allocation.registry import allocators, selectors
from verl_ext.allocation.selectors import Selector, SelectorSettings
from verl_ext.typed_settings import build


@pytest.mark.bad_input
@pytest.mark.parametrize("make, name, named", [
    (make_allocator, "zara", "allocation.allocator.name='zara'; accepted: one of dynamic_sampling, sara, uniform"),
    (make_selector, "random", "allocation.selector.name='random'; accepted: one of shuffled"),
    (make_downsampler, "pods", "allocation.downsampler.name='pods'; accepted: one of max_variance, none"),
])  # fmt: skip
def test_unknown_rules_list_the_known_ones(make, name, named):
    with pytest.raises(SettingError) as error:
        make(name)
    assert str(error.value).startswith(named.split(" of ")[0])
    assert all(rule in str(error.value) for rule in named.split(" of ")[1].split(", "))


@pytest.mark.bad_input
@pytest.mark.parametrize("make, name, settings, named", [
    (make_allocator, "uniform", {"size": 8},
     "allocation.allocator.size=8; accepted: the settings group_size, tolerance"),
    (make_allocator, "uniform", {"group_size": "8"}, "allocation.allocator.group_size='8'; accepted: an integer"),
    (make_allocator, "uniform", {"group_size": True}, "allocation.allocator.group_size=True; accepted: an integer"),
    (make_allocator, "sara", {"commit": "later"}, "allocation.allocator.commit='later'; accepted: top_up | stop"),
    (make_allocator, "sara", {"window": 2.5}, "allocation.allocator.window=2.5; accepted: an integer or adaptive"),
    (make_allocator, "sara", {"tau_low": "x"}, "allocation.allocator.tau_low='x'; accepted: a number or null"),
    (make_selector, "shuffled", {"seed": 1}, "allocation.selector.seed=1; accepted: the settings none"),
    (make_downsampler, "max_variance", {"keep": 1},
     "allocation.downsampler.keep=1; accepted: auto, or an integer of 2 or more"),
])  # fmt: skip
def test_settings_are_checked_by_name(make, name, settings, named):
    with pytest.raises(SettingError) as error:
        make(name, **settings)
    assert str(error.value) == named


def test_integers_count_as_numbers():
    assert make_allocator("sara", margin=1).settings.margin == 1.0

    @dataclass(frozen=True)
    class Plain:
        flag: bool
        name: str | None = None

    assert build(Plain, "x", {"flag": True}) == Plain(True)
    with pytest.raises(SettingError, match="x.flag=1; accepted: true or false"):
        build(Plain, "x", {"flag": 1})
    with pytest.raises(SettingError, match="x.flag=None; accepted: true or false; it has no default"):
        build(Plain, "x", {})


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="selector 'shuffled' is registered already"):
        register_selector("shuffled")(type("Other", (Selector,), {}))


def test_rules_of_installed_packages_are_found(tmp_path, monkeypatch):
    (tmp_path / "outside_rules.py").write_text(
        "from dataclasses import dataclass\n"
        "from verl_ext.allocation import Selector\n"
        "@dataclass(frozen=True)\n"
        "class Settings:\n    stride: int = 2\n"
        "class Striding(Selector):\n    Settings = Settings\n"
    )
    info = tmp_path / "outside_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-rules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[verl_ext.selectors]\nstriding = outside_rules:Striding\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert "striding" in selectors.names()
        assert make_selector("striding", stride=3).settings.stride == 3
        with pytest.raises(SettingError, match="allocation.selector.stride='a'"):
            make_selector("striding", stride="a")
    finally:
        selectors._rules.pop("striding", None)


def test_every_rule_documents_its_settings():
    assert {"uniform", "dynamic_sampling", "sara"} <= set(allocators.names())
    assert selectors.settings_type("shuffled") is SelectorSettings
