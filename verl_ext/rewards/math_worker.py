"""The process in which answers of a model meet math-verify: one answer at a time, bounded in time, memory and files.

`python -m verl_ext.rewards.math_worker DEADLINE_S MEMORY_MB MODULE` reads one JSON request a line from standard input
(`{"true": ..., "given": ...}`) and answers each with one JSON line (`{"right": ...}` or `{"unscored": name}`); see
`pool`. MODULE has the function `same` that compares two answers. It ends when its input ends.

The deadline is the kernel's: a timer without handler ends the process wherever it is, also where nobody is left to
wait for it. It counts processor time, so that a verdict does not depend on what else the machine is doing; a second
timer, CLOCK_FACTOR times as long, counts by the clock. math-verify's own time limits are Python signals, which a long
operation on a large integer never sees.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

CLOCK_FACTOR = 10
"""Seconds by the clock that a second of processor time may take."""

_MIB = 1 << 20
_RECYCLE_EVERY = 64


def _warm_up(same: Callable[[str, str], bool]) -> None:
    """Read the usual kinds of answers once: the parser builds its tables on first use, a tenth of a second each."""
    for answer in (r"\frac{1}{2}", "x^2+3x+2", "(1,2)", r"\{1,2\}", r"3\sqrt{2}", "x=5", "[1,2)", r"2\pi", "1,2"):
        same(answer, answer + " ")
    same("1/2", "\\sqrt{2}")
    same("x+1", "1+x")


def _limit(memory_mb: int) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, memory_mb * _MIB),
        (resource.RLIMIT_CORE, 0),
        # Pipes are no files: nothing is written to disk from here on.
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _set_timers(deadline_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, deadline_s)
    signal.setitimer(signal.ITIMER_REAL, CLOCK_FACTOR * deadline_s)


def _address_space_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize() / _MIB


def main() -> None:
    """Serve requests until the input ends."""
    deadline_s, memory_mb = float(sys.argv[1]), int(sys.argv[2])
    # What a library prints must not get between the answers.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    try:
        same = importlib.import_module(sys.argv[3]).same
        _warm_up(same)
        _limit(memory_mb)
    except Exception as error:
        reply(failed=repr(error)[:500])
        return
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    reply(ready=True)
    served = 0
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _set_timers(deadline_s)
        try:
            fields = {"right": same(request["true"], request["given"])}
        except MemoryError:
            fields = {"unscored": "memory"}
        except Exception as error:
            fields = {"unscored": "error", "detail": type(error).__name__}
        _set_timers(0.0)
        served += 1
        # The parser's tables grow with every new form of answer: start afresh well before the limit is felt.
        crowded = served % _RECYCLE_EVERY == 0 and _address_space_mb() > memory_mb / 2
        reply(**fields, recycle=crowded or fields.get("unscored") == "memory")


if __name__ == "__main__":
    main()
