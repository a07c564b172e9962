"""Threads in which some walks are late."""

from __future__ import annotations

import time

from jaxinfer.constraints.workers import Workers


class LateWorkers(Workers):
    """Every third piece of work takes as long as several launches."""

    num_pieces = 0

    def submit_all(self, works):
        return super().submit_all([self.late(work) for work in works])

    def late(self, work):
        self.num_pieces += 1
        seconds = 0.05 * (self.num_pieces % 3 == 0)
        return lambda: (time.sleep(seconds), work())[1]
