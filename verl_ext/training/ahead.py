"""The next step's batch is collected while the trainer updates with this one's: engines apart from the trainer.

What is saved is the state between the two steps, taken when the later one had not begun. A resumed run asks again for
what was in flight then, as the same groups and sessions.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from transfer_queue import KVBatchMeta

from verl_ext.allocation import Collected
from verl_ext.training.collector import Collector


class AheadCollector(Collector):
    """A collector whose loop runs in a thread of its own, a step ahead of the trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.last_step: int | None = None
        """Number of the run's last step, after which nothing is collected ahead; None: not known."""
        self._ahead: Future | None = None
        self._thread: threading.Thread | None = None
        self._between: dict[str, Any] | None = None
        self._finished: str | None = None

    def weights_are_out(self, global_steps: int) -> None:
        """The engines generate with the weights after that step from here on."""
        self.allocation.generating = self.version(global_steps)

    def sample(self, global_steps: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Take the step's batch, and have the next one collected."""
        if self.allocation.generating is None:
            self.weights_are_out(global_steps - 1)
        ahead, self._ahead = self._ahead or self._begin(global_steps), None
        collected, collect_s = ahead.result()
        try:
            return self._hand_over(global_steps, collected, collect_s)
        finally:
            self._between, self._finished = super()._state(), super().finished
            if self._finished is None and (self.last_step is None or global_steps < self.last_step):
                self._ahead = self._begin(global_steps + 1)

    @property
    def finished(self) -> str | None:
        return super().finished if self._between is None else self._finished

    def end(self) -> None:
        """As a collector's; a step that is being collected breaks off."""
        if self._ahead is not None and not self._ahead.done():
            self.backend.manager.stream.clear()
            self._thread.join(30.0)
        super().end()

    def _state(self) -> dict[str, Any]:
        return super()._state() if self._between is None else self._between

    def _begin(self, global_steps: int) -> Future:
        found: Future[tuple[Collected, float]] = Future()

        def collect() -> None:
            try:
                found.set_result(self._collect(global_steps))
            except BaseException as error:  # it is the trainer's, when it asks
                found.set_exception(error)

        # A daemon: a trainer that ends with an error does not wait for answers.
        self._thread = threading.Thread(target=collect, name=f"collect step {global_steps}", daemon=True)
        self._thread.start()
        return found
