# SPDX-License-Identifier: Apache-2.0
"""Synthetic run folders: the form of real ones, the ledger kept by the real ledger, the other numbers made up."""

import json
import math
import random
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from verl_ext.allocation.groups import Fate, Outcome
from verl_ext.allocation.ledger import Ledger
from verl_ext.allocation.prompt_pool import PromptPool, prompt_key
from verl_ext.allocation.state import save_state
from verl_ext.runs.outcome_records import OutcomeRecorder


def write_run(folder, steps=30, seed=0):
    """32 groups of 8 trained a step, other probes abandoned, validated every 10 steps; returns the ledger's lines."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(f"trainer:\n  total_training_steps: {steps}\n")
    ledger, lines = Ledger(), []
    untrained = {"val-core/chain_sums/acc/mean@8": 0.47, "val-core/chain_sums/acc/best@8/mean": 0.8}
    metrics = [{"step": 0, "data": untrained}]
    for step in range(1, steps + 1):
        probes = rng.randint(70, 90)
        counts = {Fate.TRAINED: 32 * 8, Fate.ABANDONED: 4 * (probes - 32), Fate.SURPLUS: rng.randint(0, 8)}
        for fate, n in counts.items():
            outcomes = [
                Outcome("g", session=i, correct=True, score=1.0, prompt_tokens=7, response_tokens=rng.randint(2, 3))
                for i in range(n)
            ]
            ledger.issue(n)
            ledger.returned(outcomes)
            ledger.settle(outcomes, fate)
        record = ledger.step_record(step)
        lines.append(record)
        gen = 1.2 + rng.random()
        data = {
            "critic/score/mean": 0.5 + step / 200,
            "allocation/effective_share": 32 / probes,
            "allocation/rounds": 3,
            "allocation/round_gap_s": 0.02,
            "allocation/rollouts": record["issued_total"],
            "allocation/step_rollouts": record["issued"],
            "allocation/tokens": record["tokens_total"],
            "allocation/step_tokens": record["tokens"],
            "allocation/skipped_updates": 0,
            **{f"allocation/fate/{fate}": n for fate, n in record["fates"].items()},
            "timing_s/gen": gen,
            "timing_s/old_log_prob": 0.6,
            "timing_s/update_actor": 1.1,
            "timing_s/update_weights": 0.2,
            "timing_s/step": gen + 2.0,
        }
        if step % 10 == 0:
            data["val-core/chain_sums/acc/mean@8"] = 0.47 + 0.005 * step
            data["timing_s/testing"] = 2.5
        metrics.append({"step": step, "data": data})
    for name, rows in (("metrics.jsonl", metrics), ("ledger.jsonl", lines)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lines


def write_compared_run(
    folder, *, speed=1.0, seed=0, steps=20, upto=None, per_step=64, noise=0.01, note=True, recipe=None, selector=None
):
    """Held-out accuracy .4 + .5 (1 - exp(-speed rollouts / 1000)), with noise of the seed; validated every 4 steps."""
    rng = random.Random(f"{folder.name} {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "trainer": {"total_training_steps": steps, "experiment_name": folder.name},
        "allocation": {"seed": seed, "allocator": {"name": "sara" if selector else "uniform"}},
        "data": {"seed": seed, "train_batch_size": 8},
        "actor_rollout_ref": {"rollout": {"n": 8}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if note:
        machine = {"processor": "A processor", "cores": "2", "memory": "24 GiB"}
        (folder / "compare.json").write_text(json.dumps({
            "recipe": recipe or folder.name.rpartition("-seed")[0], "seed": seed, "overrides": [],
            "versions": {"verl": "0.9.1", "numpy": "2.3.5"}, "machine": machine, "finished": False}))  # fmt: skip
    shift = rng.gauss(0, noise)
    ledger, lines, metrics = Ledger(), [], []

    def accuracy(rollouts):
        return 0.4 + 0.5 * (1 - math.exp(-speed * rollouts / 1000)) + shift * min(1, rollouts / 500)

    metrics.append({"step": 0, "data": {"val-core/sums/acc/mean@8": accuracy(0)}})
    for step in range(1, (upto or steps) + 1):
        for fate, n in ((Fate.TRAINED, 48), (Fate.ABANDONED, per_step - 52), (Fate.SURPLUS, 4)):
            outcomes = [Outcome("g", i, True, 1.0, 7, rng.randint(2, 5)) for i in range(n)]
            ledger.issue(n)
            ledger.returned(outcomes)
            ledger.settle(outcomes, fate)
        record = ledger.step_record(step)
        lines.append(record)
        data = {
            "allocation/effective_share": 0.35 + 0.05 * rng.random(),
            "allocation/batch_effective_share": 1.0,
            "allocation/groups": 6,
            "allocation/rollouts": record["issued_total"],
            "allocation/tokens": record["tokens_total"],
            "timing_s/step": 3.6,
        }
        if selector:
            data |= {"allocation/p_eff_predicted": 0.6, "allocation/p_eff_realised": 0.3 + 0.1 * rng.random(),
                     f"allocation/selector/{selector}_predicted": 0.5,
                     f"allocation/selector/{selector}_realised": 0.45}  # fmt: skip
        if step % 4 == 0 or step == steps:
            data["val-core/sums/acc/mean@8"] = accuracy(record["issued_total"])
        metrics.append({"step": step, "data": data})
    for name, rows in (("metrics.jsonl", metrics), ("ledger.jsonl", lines)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def add_prompts(folder, prompts=60, steps=30):
    """What a run records of its prompts: a data set by difficulty, outcomes, a checkpoint with the first one retired,
    and answers; returns success by difficulty, from the outcomes."""
    keys, rows = [], []
    for i in range(prompts):
        message = [{"role": "user", "content": f"What is {i}? " + "long " * 30}]
        rows.append({"data_source": "sums", "prompt": message, "reward_model": {"ground_truth": str(i)},
                     "extra_info": {"difficulty": i % 3, "index": i}})  # fmt: skip
        keys.append(prompt_key("sums", message, str(i)))
    data = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), data)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["data"] = {"train_files": [str(data)], "prompt_key": "prompt"}
    config["allocation"] = {"record": "auto"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    pool, rng, right = PromptPool(keys), random.Random(0), {0: [], 1: [], 2: []}
    recorder = OutcomeRecorder(folder / "outcomes", keys)
    for step in range(1, steps + 1):
        requests = [SimpleNamespace(group=SimpleNamespace(uid=f"g{row}", prompt=row))
                    for row in rng.sample(range(prompts - 10), 8)]  # fmt: skip
        outcomes = []
        for request in requests:
            row = request.group.prompt
            for session in range(4):
                correct = None if session == 3 and row == 0 else rng.random() < (0.9, 0.5, 0.1)[row % 3]
                if correct is not None:
                    right[row % 3].append(correct)
                score = None if correct is None else float(correct)
                outcomes.append(Outcome(request.group.uid, session, correct, score, 7, 3))
        backend = SimpleNamespace(generate=lambda _, outcomes=outcomes: outcomes)
        recorder.around(backend, step).generate(requests)
        recorder.end_step()
    pool.retire(0)
    save_state(folder / "global_step_30" / "allocation", {"allocation": {"pool": pool.state_dict()}})
    answers = [{"step": step, "verdict": verdict, "prompt": f"What is {step}?", "answer": "<b>so</b> " * 60 + verdict,
                "truth": "'1'", "reward": "{'acc': 1}"}
               for step in range(1, steps + 1) for verdict in ("right", "wrong", "unscored")]  # fmt: skip
    (folder / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return {level: sum(values) / len(values) for level, values in right.items()}
