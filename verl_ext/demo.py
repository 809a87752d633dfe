# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.demo [any.verl.key=value ...]`: watch a policy learn on this machine's CPU, with the whole stack.

Runs `python -m verl_ext.main_ppo recipe=cpu/sara` as a child, and shows its steps; all else is in `train.log` in the
run's folder. Held-out success is not sampled: it is computed from the weights that the run saves. Exit status: 0 if
it rose by at least `MIN_GAIN` and the ledger adds up, 1 if not or if the run failed, 130 if it was stopped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from verl_ext.files import restrict_umask
from verl_ext.launch.cleanup import end_child
from verl_ext.reports.run_page import drawn_lines
from verl_ext.reports.run_table import table
from verl_ext.runs.ledger_check import ledger_faults
from verl_ext.runs.records import CONFIG, METRICS, Run, read_config, read_run

MIN_GAIN = 0.07
"""Held-out success must rise by this much over the untrained policy's. Runs rise by .12 to .15: at a constant learning
rate success goes up and down by about .01 from step to step."""

COMMAND = (
    *(sys.executable, "-m", "verl_ext.main_ppo", "recipe=cpu/sara", "trainer.resume_mode=disable"),
    *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=6"),
    # A save of half a million weights takes hundredths of a second. On this machine, also where a cluster is at hand.
    *("actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]", "++ray_kwargs.ray_init.address=local"),
)
HELD_OUT = "val-core/chain_sums/acc/mean@1"
STEP = re.compile(r"step +(\d+)/\d+ \| .*")

INTRO = """\
verl_ext demo: reinforcement learning with verifiable rewards, for real, on this machine's CPU.

  stack   verl's own V1 trainer, Ray, TransferQueue, FSDP and vLLM's CPU build; nothing is simulated
  policy  a Qwen2 of half a million parameters, pre-trained on sums such as 9+8+7+6= by a sloppy adder, who forgets each
          carried ten half of the time; so it is right on some prompts always, on some never, on some now and then
  reward  1 for the true total, else 0: the habit of forgetting tens has to go
  SARA    decides where rollouts go: a few per prompt first, more only where right and wrong answers are mixed, since
          a group that is all right or all wrong teaches GRPO nothing

Starting the stack takes a minute or two. Ctrl-C stops it and leaves nothing running."""


def held_out_success(folder: Path, step: int) -> float | None:
    """Mean probability of the right answer over the held-out prompts after a step of the run; None: not saved there."""
    import torch  # only once the run is under way
    from transformers.utils.logging import disable_progress_bar

    from verl_ext.tiny.measure import measure_saved

    disable_progress_bar()
    # The run needs the cores.
    torch.set_num_threads(1)
    config = read_config(folder / CONFIG)
    base = config["actor_rollout_ref"]["model"]["path"]
    saved = folder / f"global_step_{step}" / "actor" / "huggingface" if step else base
    return measure_saved(saved, config["data"]["val_files"]).mean if os.path.isdir(saved) else None


def train(
    folder: Path, arguments: list[str], command: Sequence[str] = (),
    success_after: Callable[[Path, int], float | None] | None = None, metric: str = HELD_OUT,
) -> None:  # fmt: skip
    """Run the training to its end, show its steps, and add held-out success to its metrics.

    Args:
        folder: of the run.
        arguments: added to the command.
        command: what is run; default `COMMAND`.
        success_after: held-out success after a step, None where it is not known; default `held_out_success`.
        metric: its name.

    Raises:
        RuntimeError: the run ended with an error; the message holds the last that it said.
        KeyboardInterrupt: it was stopped; nothing of it is left running.
    """
    folder.mkdir(parents=True)
    success, tail = {}, []
    success_after = success_after or held_out_success
    # A group of its own: Ctrl-C reaches the run through `end_child` alone, once.
    child = subprocess.Popen(
        [*(command or COMMAND), *arguments, f"trainer.default_local_dir={folder}"],
        env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    try:
        for line in child.stdout:
            tail = [*tail[-9:], line]
            if step := STEP.search(line):
                for number in sorted({0, int(step[1])} - success.keys()):
                    success[number] = success_after(folder, number)
                now = success[int(step[1])]
                print(step[0] + (f" | held-out {now:.3f}" if now is not None else ""), flush=True)
            elif line.startswith(("...", "warning:")):
                print(line, end="", flush=True)
    finally:
        end_child(child)
    if child.returncode:
        raise RuntimeError(f"the run ended with status {child.returncode}:\n{''.join(tail)}")
    with (folder / METRICS).open("a") as file:
        known = {step: p for step, p in success.items() if p is not None}
        file.writelines(json.dumps({"step": step, "data": {metric: p}}) + "\n" for step, p in known.items())


def verdict(run: Run) -> tuple[bool, str]:
    """Whether the run shows what the demo promises, and a sentence that says so."""
    success = {record.step: record.data[HELD_OUT] for record in run.records if HELD_OUT in record.data}
    if 0 not in success or run.records[-1].step not in success or len(success) < 2:
        return False, "NOT reached: the weights before and after training are not both there to be measured."
    if not run.ledger or ledger_faults(run.ledger):
        return False, "NOT reached: the ledger does not add up."
    before, after = success[0], success[run.records[-1].step]
    reached = after - before >= MIN_GAIN
    return reached, (
        f"{'Reached' if reached else 'NOT reached'}: held-out success {before:.3f} -> {after:.3f}, "
        f"{after - before:+.3f}; at least {MIN_GAIN:+.2f} was to be shown."
    )


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns the exit status (see the module's docstring)."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0
    restrict_umask()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    begin = time.monotonic()
    folder = Path("outputs", "verl_ext", f"demo-{datetime.now():%Y%m%d-%H%M%S}")
    print(f"{INTRO}\nRun's folder: {folder} (all output of the stack: train.log)", flush=True)
    try:
        train(folder, arguments)
        run = read_run(folder)
        reached, sentence = verdict(run)
        minutes = (time.monotonic() - begin) / 60
        print(f"\n{table(run)}\n\n{sentence}\n{drawn_lines(run)}\nAll in all {minutes:.1f} minutes.", flush=True)
        return 0 if reached else 1
    except KeyboardInterrupt:
        print("\nStopped.", flush=True)
        return 130
    except (RuntimeError, ValueError) as error:
        print(f"\nverl_ext.demo: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
