"""What the tests of Pilot-Commit share."""

from verl_ext.allocation import Outcome

SMALL = {"group_size": 16, "n_pilot": 4, "p_lower": 0.25, "p_upper": 0.75}


class Half:
    """Every other rollout is right."""

    def generate(self, requests):
        return [Outcome(r.group.uid, s, s % 2 == 0, float(s % 2 == 0), 1, 1) for r in requests for s in r.sessions]


def requested(run):
    """The rounds of a run as lists of (prompt's group uid, first session, n)."""
    rounds, generate = [], run.backend.generate
    run.backend.generate = lambda requests: (
        rounds.append([(r.group.uid, r.first, r.n) for r in requests]), generate(requests)
    )[1]  # fmt: skip
    return rounds


def step(run, number, version=None):
    collected = run.collect(number, run.backend, policy_version=version)
    return collected, run.ledger.step_record(number)
