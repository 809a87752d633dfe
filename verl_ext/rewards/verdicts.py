"""Verdicts remembered, so that equal answers to a prompt are judged once, also where they come at the same time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future


class Verdicts:
    """The latest verdicts by question; failures are shared by those who wait, but not remembered.

    The rollouts of a group answer one prompt at one time, mostly with a few different answers: remembering alone would
    come too late for most of them.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: OrderedDict[Hashable, Future[bool]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, question: Hashable, judge: Callable[[], bool]) -> bool:
        """The verdict on `question`, from `judge` unless it is known or being found out.

        Raises:
            Exception: what `judge` raised, here or in the thread waited for.
        """
        with self._lock:
            verdict = self._known.get(question)
            mine = verdict is None
            if mine:
                verdict = self._known[question] = Future()
            else:
                self._known.move_to_end(question)
        if mine:
            try:
                verdict.set_result(judge())
            except BaseException as error:
                with self._lock:
                    self._known.pop(question, None)
                verdict.set_exception(error)
            with self._lock:
                while len(self._known) > self.most:
                    self._known.popitem(last=False)
        return verdict.result()

    def clear(self) -> None:
        """Forget all verdicts."""
        with self._lock:
            self._known.clear()
