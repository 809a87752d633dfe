# SPDX-License-Identifier: Apache-2.0
"""Simulated runs, and the command line."""

import json
import logging
import subprocess
import sys

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from benchmarks import closed_form
from verl_ext import simulate as command_line
from verl_ext.allocation import AllocationSettings as given
from verl_ext.allocation import Stop, effective_probability
from verl_ext.simulate import run as run_config
from verl_ext.simulation.simulation import Simulation, simulate
from verl_ext.simulation.simulation_settings import WorldSettings

SARA = {"name": "sara"}


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("verl_ext.allocation").setLevel(logging.ERROR)
    yield
    logging.getLogger("verl_ext.allocation").setLevel(logging.NOTSET)


def small(**more):
    return WorldSettings(**{"prompts": 600, "steps": 4, "batch": 16, "held_out": 50, "topics": 5, **more})


def test_the_ledger_of_the_counted_steps_adds_up():
    rules = given(allocator={"name": "sara", "max_staleness": 1, "margin": 0.5})
    ledger = simulate("u_shaped", small(warmup_steps=3), rules)["ledger"]
    grown = ledger["waiting"] - ledger["waiting_before"]
    assert ledger["waiting"] > 0
    assert ledger["issued"] == sum(ledger["fates"].values()) + grown
    grown_tokens = ledger["waiting_tokens"] - ledger["waiting_tokens_before"]
    assert ledger["tokens"] == sum(ledger["fate_tokens"].values()) + grown_tokens


def test_warm_up_is_not_counted():
    counted = simulate("u_shaped", small(warmup_steps=3, frozen=True), given())
    assert counted["rollouts"] == 4 * 16 * 8 and len(counted["curve"]) == 5
    longer = Simulation.of_world("u_shaped", small(frozen=True), given())
    steps = [longer.step() for _ in range(7)]
    assert counted["effective_groups"] == sum(group.mixed for step in steps[3:] for group in step.groups)


def test_a_seed_decides_all():
    a, b, c = (simulate("u_shaped", small(), given({"name": "mopps"}, SARA), seed) for seed in (3, 3, 4))
    assert a == b and a != c


def test_learning_lifts_accuracy_and_freezing_does_not():
    learnt = simulate("u_shaped", small(pace=2), given())["curve"]
    assert learnt[-1]["accuracy"] > learnt[0]["accuracy"] + 0.02
    frozen = simulate("u_shaped", small(frozen=True), given())["curve"]
    assert frozen[-1]["accuracy"] == frozen[0]["accuracy"]
    assert frozen[-1]["effective_share"] == pytest.approx(0.33, abs=5e-3)


def test_drift_moves_prompts_that_nothing_trains():
    run = Simulation.of_world("uniform", small(drift=0.5, pace=10**9, own=0.0), given())
    before = run.population.rates()
    run.step()
    assert np.abs(run.population.rates() - before).min() > 0


@pytest.mark.parametrize("population", ["all_solved", "all_hopeless"])
@pytest.mark.parametrize("allocator", ["uniform", "dynamic_sampling", "sara"])
def test_saturated_populations_end(population, allocator):
    result = simulate(population, small(steps=2), given(allocator={"name": allocator}))
    assert result["effective_groups"] == 0 and result["rollouts_per_effective_group"] is None
    assert result["rollouts"] <= 2 * 6 * 16 * 8
    assert result["accuracy"] == (1.0 if population == "all_solved" else 0.0)


def test_wrong_answers_are_longer():
    tokens = {p: simulate(p, small(steps=1), given()) for p in ("all_solved", "all_hopeless")}
    mean = {p: result["tokens"] / result["rollouts"] for p, result in tokens.items()}
    assert mean["all_solved"] == pytest.approx(400, rel=0.15)
    assert mean["all_hopeless"] == pytest.approx(800, rel=0.15)


@pytest.mark.parametrize("commit", ["top_up", "stop"])
def test_monte_carlo_agrees_with_the_closed_form(commit):
    """Of all groups started, surplus ones included: within 3 %."""
    world = WorldSettings(prompts=8000, steps=8, batch=128, frozen=True, effective_share=0.35, held_out=1)
    run = Simulation.of_world("u_shaped", world, given(allocator={"name": "sara", "commit": commit, "window": 400}))
    groups = [group for _ in range(world.steps) for group in run.step().started]
    cost = sum(8 if group.mixed and commit == "top_up" else 4 for group in groups)
    expected = closed_form.sara(run.population.rates(), 8, 4, commit)
    assert cost / sum(group.mixed for group in groups) == pytest.approx(expected, rel=0.03)


def test_dynamic_sampling_costs_k_over_e():
    world = WorldSettings(prompts=8000, steps=10, batch=128, frozen=True, effective_share=0.35, held_out=1)
    rules = given(
        allocator={"name": "dynamic_sampling", "refill": "one_for_one"}, max_rounds=40, stop=Stop(rollouts=99_999)
    )
    assert simulate("u_shaped", world, rules)["rollouts_per_effective_group"] == pytest.approx(8 / 0.35, rel=0.03)


def test_the_uniform_population_is_what_the_uniform_prior_expects():
    """The share of probes that are mixed is what SARA's prior predicts, here and only here."""
    world = WorldSettings(prompts=8000, steps=4, batch=128, frozen=True, held_out=1)
    run = Simulation.of_world("uniform", world, given(allocator=SARA))
    groups = [group for _ in range(world.steps) for group in run.step().started]
    mixed = sum(group.mixed for group in groups) / len(groups)
    assert mixed == pytest.approx(float(effective_probability(0, 0, 4)), abs=0.05)


def test_the_command_line(tmp_path):
    """Same rules and groups as training; nothing of the training stack is imported; the file has what is promised."""
    output = tmp_path / "folder" / "x.json"
    code = (
        "import sys, runpy; sys.argv[0] = 'simulate'\n"
        "try: runpy.run_module('verl_ext.simulate', run_name='__main__')\n"
        "finally: print('loaded:', sorted({'verl', 'ray', 'torch', 'vllm'} & set(sys.modules)))"
    )
    arguments = ["allocation/selector=cero", "allocation/allocator=sara", "allocation.allocator.probe=3", "seed=5",
                 "population=u_shaped", "simulation.prompts=500", "simulation.steps=3", "simulation.batch=16",
                 "simulation.warmup_steps=1", "simulation.effective_share=0.4", f"output={output}"]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loaded: []" in done.stdout
    result = json.loads(output.read_text())
    assert {"rollouts", "tokens", "effective_groups", "rollouts_per_effective_group", "rounds_per_step", "ledger",
            "accuracy"} <= set(result)  # fmt: skip
    assert result["settings"]["allocation"]["selector"]["rounds"] == 4
    assert result["settings"]["allocation"]["allocator"]["probe"] == 3
    world = WorldSettings(prompts=500, steps=3, batch=16, warmup_steps=1, effective_share=0.4)
    rules = given({"name": "cero", "rounds": 4, "seed": 5}, {"name": "sara", "probe": 3})
    assert result["rollouts"] == simulate("u_shaped", world, rules, 5)["rollouts"]
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


@pytest.mark.bad_input
@pytest.mark.parametrize("overrides, message", [
    (["allocation/allocator=sara", "allocation.allocator.probe=9"],
     "allocation.allocator.probe=9; accepted: an integer in [2, group_size=8]"),
    (["seed=-1"], "seed=-1; accepted: an integer of 0 or more"),
    (["+allocation.deadline_s=3"], "allocation.deadline_s=3; accepted: "),
    (["allocation.rounds=fast"], "allocation.rounds='fast'; accepted: barrier | streaming"),
    (["population=recorded"], "simulation.record=None; accepted: a recorded table"),
    (["allocation.stop=null"], "allocation.stop=None; accepted: a group of settings"),
    (["simulation=null"], "simulation=None; accepted: a group of settings"),
    (["trainer=null"], "trainer=None; accepted: a group of settings"),
    (["allocation.allocator=null"], "allocation.allocator=None; accepted: a group of settings"),
    (["simulation.steps=abc"], "simulation.steps='abc'; accepted: an integer"),
    (["simulation.length=5"], "simulation.length=5; accepted: a group of settings"),
    (["allocation.max_rounds=abc"], "allocation.max_rounds='abc'; accepted: an integer"),
    (["allocation.stop.groups=abc"], "allocation.stop.groups='abc'; accepted: null or an integer of 1 or more"),
    (["allocation.stop.groups=0"], "allocation.stop.groups=0; accepted: null or an integer of 1 or more"),
    (["allocation.stop.rollouts=abc"], "allocation.stop.rollouts='abc'; accepted: null or an integer of 1 or more"),
])  # fmt: skip
def test_bad_settings_are_refused_by_name(overrides, message):
    with initialize_config_module("verl_ext.configs", version_base=None):
        config = compose("simulate", ["simulation.steps=1", "simulation.prompts=300", *overrides])
    with pytest.raises(ValueError) as error:
        run_config(config)
    assert str(error.value).startswith(message)


def call_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["simulate", *arguments])
    command_line.main()


@pytest.mark.bad_input
@pytest.mark.parametrize("output", ["/proc/x.json", "/dev/null/x.json", "{tmp}/dir.json", "~nobody-here/x.json"])
def test_an_output_that_cannot_be_written_is_refused_before_the_simulation(output, tmp_path, monkeypatch):
    (tmp_path / "dir.json").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "run", lambda config: pytest.fail("simulated first"))
    output = output.format(tmp=tmp_path)
    with pytest.raises(SystemExit) as end:
        call_main(monkeypatch, f"output='{output}'")
    assert str(end.value).startswith(f"verl_ext.simulate: output={output!r}; accepted: null or a path that ends in")
    assert list(tmp_path.iterdir()) == [tmp_path / "dir.json"]


@pytest.mark.bad_input
def test_an_output_that_can_no_longer_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def run_and_get_in_the_way(config):
        (tmp_path / "x.json").mkdir()
        return run_config(config)

    monkeypatch.setattr(command_line, "run", run_and_get_in_the_way)
    output = str(tmp_path / "x.json")
    with pytest.raises(SystemExit) as end:
        call_main(monkeypatch, "simulation.prompts=300", "simulation.steps=1", "simulation.batch=2", f"output={output}")
    assert str(end.value).startswith(f"verl_ext.simulate: output={output!r} cannot be written: ")
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]


def test_the_home_folder_in_the_output_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command_line.output_path("~/new/x.json") == tmp_path / "new" / "x.json"
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]


def test_streaming_takes_less_time_for_the_same_groups():
    world = small(slots=64, frozen=True)
    whole, streamed = (simulate("u_shaped", world, given(allocator=SARA, rounds=r)) for r in ("barrier", "streaming"))
    assert whole["effective_groups"] == streamed["effective_groups"] == 4 * 16
    assert streamed["seconds"] < whole["seconds"] and streamed["idle_share"] < whole["idle_share"]
    assert streamed["ledger"]["fates"]["aborted"] > 0 == whole["ledger"]["fates"]["aborted"]
    for result in (whole, streamed):
        # every token is generated by some slot, for a second
        assert result["tokens"] <= result["seconds"] * 64
        assert result["idle_share"] == pytest.approx(1 - result["tokens"] / (result["seconds"] * 64), abs=1e-3)


def test_a_clock_changes_nothing_but_the_time():
    timed, plain = simulate("u_shaped", small(slots=50), given()), simulate("u_shaped", small(), given())
    assert timed.pop("seconds") > 0 and 0 < timed.pop("idle_share") < 1
    assert timed == plain


def test_without_slots_nothing_queues():
    result = simulate("u_shaped", small(steps=1, frozen=True), given(allocator=SARA, rounds="streaming"))
    assert "idle_share" not in result and 0 < result["seconds"] <= 8 * 4096
