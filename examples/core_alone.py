# SPDX-License-Identifier: Apache-2.0
"""The core alone: rules around your own generate function, without verl, Ray or PyTorch.

    python examples/core_alone.py

`generate` stands for your engine and your reward. The loop around it is all that an outside trainer needs.
"""

import random

from verl_ext.allocation import Allocation, Outcome

PROMPTS = [f"What is {a} + {b}?" for a in range(20) for b in range(20)]
SETTINGS = {
    "allocator": {"name": "sara", "group_size": 8},
    "selector": {"name": "greso"},
    "stop": {"groups": 16, "rollouts": 128},
}


class Engine:
    """Answers every request with one outcome a rollout; here prompts have success rates between 0 and 1."""

    def generate(self, requests):
        return [self.outcome(request.group, session) for request in requests for session in request.sessions]

    def outcome(self, group, session):
        right = random.random() < group.prompt / len(PROMPTS)  # group.prompt is the row of PROMPTS
        return Outcome(group.uid, session, right, float(right), prompt_tokens=7, response_tokens=3)


def main():
    """Collect five batches and say what became of the rollouts."""
    random.seed(0)
    allocation = Allocation.from_settings(SETTINGS, PROMPTS, seed=0)
    for step in range(1, 6):
        batch = allocation.collect(step, Engine())
        # Train here on batch.kept, group by group; batch.dropped can be freed.
        fates = allocation.ledger.step_record(step)["fates"]
        became = ", ".join(f"{fate} {n}" for fate, n in fates.items() if n)
        print(f"step {step}: {batch.rollouts} rollouts, {len(batch.groups)} groups, {batch.rounds} rounds: {became}")


if __name__ == "__main__":
    main()
