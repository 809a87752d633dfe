# SPDX-License-Identifier: Apache-2.0
"""What a user types, and what a misspelt word is answered by."""

import sys

import pytest

from verl_ext import cli, main_ppo
from verl_ext.command_line import run_command
from verl_ext.configuration import compose_config, group_options


def answer(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["main_ppo", *words])
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: compose_config(words))
    return str(ended.value)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("recipe=cpu/sarra",), "recipe=cpu/sarra: there is no such file; did you mean cpu/sara"),
        (("recipe=sara",), "did you mean cpu/sara"),
        (
            ("recipe=cpu/sara", "allocation/allocator=sarra"),
            "allocation/allocator=sarra: there is no such file; did you mean",
        ),
        (("recipe=cpu/sara", "allocation/alocator=sara"), "did you mean allocation/allocator"),
        (("recipe=cpu/sara", "allocation.allocator.probee=3"), "did you mean allocation.allocator.probe?"),
        (("recipe=cpu/sara", "allocation.alocator.probe=3"), "did you mean allocation.allocator.probe"),
        (("recipe=cpu/sara", "trainer.total_epoch=3"), "did you mean trainer.total_epochs?"),
        (("recipe=cpu/sara", "allocation.foo=3"), "allocation has: all_zero_steps, allocator"),
        (("hardware=gpu_8x8",), "hardware=gpu_8x8: there is no such file; did you mean gpu_"),
    ],
)
def test_a_misspelt_word_is_answered_by_the_nearest(monkeypatch, words, said):
    assert said in answer(monkeypatch, *words)


def test_what_is_right_runs(monkeypatch):
    seen = []
    run_command(lambda: seen.append(compose_config(["recipe=cpu/sara"]).allocation.allocator.name))
    assert seen == ["sara"]


def test_every_recipe_can_be_named():
    assert {"cpu/sara", "dapo_math_17k/sara"} <= set(group_options("recipe"))
    assert "uniform" in group_options("allocation/allocator") and not group_options("nonesuch")


def test_the_commands_of_verl_ext(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(cli.runpy, "run_module", lambda module, **how: ran.append((module, sys.argv[1:])))
    for words in (["train", "recipe=cpu/sara"], ["data", "gsm8k", "--output", "x"], ["report", "folder"]):
        monkeypatch.setattr(sys, "argv", ["verl-ext", *words])
        cli.main()
    assert ran == [
        ("verl_ext.main_ppo", ["recipe=cpu/sara"]),
        ("verl_ext.data.gsm8k", ["--output", "x"]),
        ("verl_ext.report", ["folder"]),
    ]
    monkeypatch.setattr(sys, "argv", ["verl-ext"])
    cli.main()
    assert "simulate" in capsys.readouterr().out


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "said"),
    [(["trian"], "did you mean train"), (["data", "gsm8"], "did you mean gsm8k"), (["data"], "known are")],
)
def test_a_command_that_is_none(monkeypatch, words, said):
    monkeypatch.setattr(sys, "argv", ["verl-ext", *words])
    with pytest.raises(SystemExit, match=said):
        cli.main()


@pytest.mark.parametrize("name", sorted(set(cli.COMMANDS) - {"lab"}))
def test_every_command_is_there(name):
    import importlib.util

    assert importlib.util.find_spec(cli.COMMANDS[name][0]) is not None


@pytest.mark.parametrize("error, said", [
    (RuntimeError("CUDA out of memory. Tried to allocate\n2 GiB"),
     "RuntimeError: CUDA out of memory. Tried to allocate; python -m verl_ext.check"),
    (KeyError("x"), "KeyError: 'x'. A resume goes on from the start"),
])  # fmt: skip
def test_an_error_of_a_run_ends_it_with_one_line_that_says_how_to_go_on(monkeypatch, tmp_path, error, said):
    def run(config, command, screen):
        screen.log_to(str(tmp_path))
        raise error

    monkeypatch.setattr(main_ppo, "run", run)
    monkeypatch.setattr(sys, "argv", ["main_ppo", "recipe=cpu/sara", f"trainer.default_local_dir={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        main_ppo.main()
    line = str(ended.value)
    assert line.startswith(f"verl_ext: {said}") and line.endswith(f"All output: {tmp_path}/train.log")
    assert "\n" not in line and "A resume goes on from the start: no checkpoint is whole" in line
