"""The two kills of the demo, made at named points of the commit, not after some time.

(a) a training rank, SIGKILLed while a stager is stopped in the middle of staging;
(b) the coordinator, which SIGKILLs itself between the last stage vote and the first accept record.

A kill counts only when its point was truly passed and the process is truly gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...storage.failpoints import arm, fired, release
from .ranks import RankGroup
from .recipe import Recipe

STAGING_BEGINS = "stager.stage.begin"
ALL_STAGED = "coordinator.staged"
_POINT_DEADLINE_S = 60.0  # from arming to the moment the point is passed
_GONE_DEADLINE_S = 30.0  # from SIGKILL to the end of the process
_POLL_S = 0.005


class Kill:
    """One planned kill. `happened` turns true once the victim is gone; `story` then says what happened."""

    def __init__(self, victim: str, step: int) -> None:
        self.victim = victim
        self.step = step  # the save in which it is made
        self.happened = False
        self.story = "its point was never passed"


class Kills:
    """Arms both kills for their saves and watches them happen. `arm_for` is called just before a save of a step."""

    def __init__(self, recipe: Recipe, directory: Path, on_event: Callable[[str], None]) -> None:
        saves = recipe.save_steps
        first = 1 if len(saves) > 3 else 0  # with room for it, a commit comes before the kills; one always comes after
        self.rank = Kill("training rank", saves[first])
        self.coordinator = Kill("coordinator", saves[first + 1])
        self._victim_rank = recipe.world_size - 1
        self._directory = directory
        self._on_event = on_event
        self._armed: set[str] = set()
        self._watchers: list[threading.Thread] = []
        self._stop = threading.Event()

    def arm_for(self, step: int, ranks: RankGroup) -> None:
        """Arms what is planned for the save of `step`; each kill is armed once, also when the step is run again."""
        if step == self.rank.step and STAGING_BEGINS not in self._armed:
            self._arm(STAGING_BEGINS, "pause", self._kill_rank, ranks.pids[self._victim_rank])
        if step == self.coordinator.step and ALL_STAGED not in self._armed:
            self._arm(ALL_STAGED, "kill", self._see_coordinator_die)

    def settle(self, deadline_s: float = _POINT_DEADLINE_S + _GONE_DEADLINE_S) -> None:
        """Returns when every watcher has seen its kill or given up."""
        for watcher in self._watchers:
            watcher.join(deadline_s)

    def close(self) -> None:
        """Stops watching, and lets go whoever is still paused."""
        self._stop.set()
        self.settle()
        for point in self._armed:
            release(self._directory, point)

    def _arm(self, point: str, action: str, watch: Callable[..., None], *arguments: object) -> None:
        arm(self._directory, point, action)
        self._armed.add(point)
        watcher = threading.Thread(target=watch, args=arguments, name=f"demo-kill-{point}", daemon=True)
        self._watchers.append(watcher)
        watcher.start()

    def _kill_rank(self, pid: int) -> None:
        if not self._wait(lambda: fired(self._directory, STAGING_BEGINS), _POINT_DEADLINE_S):
            return
        try:
            with contextlib.suppress(ProcessLookupError):  # then it died of something else, which shows as not exact
                os.kill(pid, signal.SIGKILL)
            self.rank.happened = self._wait(lambda: gone(pid), _GONE_DEADLINE_S)
        finally:
            release(self._directory, STAGING_BEGINS)
        self.rank.story = f"rank {self._victim_rank} (pid {pid}) SIGKILLed while step {self.rank.step} was being staged"
        self._on_event(self.rank.story)

    def _see_coordinator_die(self) -> None:
        # The point renames its file before it kills: `fired` is the coordinator's own last act. That it truly died
        # is confirmed by the higher epoch of the one that follows it (scenario.py).
        self.coordinator.happened = self._wait(lambda: fired(self._directory, ALL_STAGED), _POINT_DEADLINE_S)
        if self.coordinator.happened:
            self.coordinator.story = f"SIGKILLed with all votes of step {self.coordinator.step} in, nothing accepted"
            self._on_event(f"coordinator {self.coordinator.story}")

    def _wait(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        until = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > until or self._stop.wait(_POLL_S):
                return condition()
        return True


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that waits for its parent counts as ended)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in ("Z", "X")
