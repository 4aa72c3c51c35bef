r"""The quiescent window of one member: when its weights may be copied. The rule: one door for every change of window.

    closed --marking(step)--> open(step) --before_step--> closed (an update runs) --after_step--> closed
                                  \------close()--------> closed

`copying(step)` needs the window of that step open, and while it lasts the optimizer's next step waits in its
pre-hook. The wait is bounded: `hold_limit_s` after the copy began training goes on and the copy is void (copying()
raises DeadlineError at its end), so a stuck copy costs one attempt and never the run.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import NamedTuple

from ..storage.errors import DeadlineError, LastgoodError, SnapshotError, WindowClosedError

HOLD_LIMIT_S = 600.0


class _Copy:
    """One copy under way."""

    def __init__(self, what: str, until: float, step: int | None = None) -> None:
        self.what = what
        self.step = step  # whose live state it copies; None for a mark
        self.until = until  # updates wait for it no longer
        self.void = False  # an update began while it ran


class _Update(NamedTuple):
    """One step call under way, known by its frame. The frame itself is not kept: it would keep a batch in memory."""

    frame: int  # id, unique while the call runs
    code: CodeType
    thread: int

    @classmethod
    def of(cls, frame: FrameType) -> _Update:
        return cls(id(frame), frame.f_code, threading.get_ident())

    def is_on(self, frame: FrameType | None) -> bool:
        """Is it `frame` or a caller of it?"""
        while frame is not None:
            if id(frame) == self.frame and frame.f_code is self.code:
                return True
            frame = frame.f_back
        return False


class Gate:
    """Holds a member's updates back while its state is copied, and refuses copies while an update runs."""

    def __init__(
        self, member: str, *, hold_limit_s: float = HOLD_LIMIT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`hold_limit_s`: how long a copy may hold updates back, counted from its own begin; for marks, their wait."""
        self.member = member
        self.hold_limit_s = hold_limit_s
        self._clock = clock
        self._changed = threading.Condition()
        self._open_step: int | None = None
        self._copies: list[_Copy] = []
        self._updates: dict[int, _Update] = {}  # by optimizer; stays when the step raises
        self._unmarked: tuple[int, LastgoodError] | None = None  # the last step, when its mark failed, and why

    @property
    def open_step(self) -> int | None:
        """The step whose window is open; None while it is closed."""
        with self._changed:
            return self._open_step

    @property
    def copies(self) -> bool:
        """Whether a copy or a mark is under way."""
        with self._changed:
            return bool(self._copies)

    @contextlib.contextmanager
    def marking(self, step: int) -> Iterator[None]:
        """Opens the window of `step` when its body ends well; updates wait while the body runs.

        Raises WindowClosedError when an update is running, SnapshotError when one began and never ended,
        DeadlineError when copies of an earlier step run for longer than hold_limit_s. Whoever requires that window
        afterwards is told the same, and what the body raised.
        """
        self._unmarked = None
        try:
            with self._marking(step):
                yield
        except LastgoodError as error:
            # Without its traceback, whose frames would keep a batch in memory.
            self._unmarked = (step, type(error)(error.message, **error.facts))
            raise

    @contextlib.contextmanager
    def _marking(self, step: int) -> Iterator[None]:
        with self._changed:
            self._refuse_in_update(f"step {step} cannot be marked")
            if not self._wait_for_copies(self.hold_limit_s):
                raise self._late(f"the mark of step {step}", self.hold_limit_s)
            self._refuse_in_update(f"step {step} cannot be marked")
            self._open_step = None
            copy = self._begin(f"the mark of step {step}")
        try:
            yield
        except BaseException:
            self._end(copy)
            raise
        with self._changed:
            self._end(copy)
            self._refuse_void(copy)
            self._open_step = step

    @contextlib.contextmanager
    def copying(self, step: int) -> Iterator[None]:
        """Surrounds the copy of `step`'s live state; the member's next update waits until the body has ended.

        Raises WindowClosedError when the window of `step` is not open. Raises DeadlineError at its end when an update
        went on without waiting any longer: what was copied is void and must not be used.
        """
        with self._changed:
            self._require(step)
            copy = self._begin(f"the copy of step {step}", step)
        try:
            yield
        except BaseException:
            self._end(copy)
            raise
        self._end(copy)
        self._refuse_void(copy)

    def require(self, step: int) -> None:
        """Raises WindowClosedError unless the window of `step` is open, or what its mark has raised."""
        with self._changed:
            if self._unmarked is not None and self._unmarked[0] == step:
                raise self._unmarked[1].with_traceback(None)
            self._require(step)

    def require_copying(self, step: int) -> None:
        """Raises WindowClosedError unless the window of `step` is open, or a copy of it holds updates back."""
        with self._changed:
            if not any(copy.step == step and not copy.void for copy in self._copies):
                self._require(step)

    def close(self, deadline_s: float) -> None:
        """Closes the window; returns when no copy runs, and none starts before the next mark.

        Raises DeadlineError when copies run for longer than `deadline_s`; the window is closed even then, and they are
        void.
        """
        with self._changed:
            self._open_step = None
            if not self._wait_for_copies(deadline_s):
                for copy in self._copies:
                    copy.void = True  # whoever asked may go on to an update all the same
                raise self._late("closing the window", deadline_s)
            self._open_step = None  # a mark that was under way may have opened it

    def before_step(self, optimizer: int, frame: FrameType) -> None:
        """An optimizer is about to step: waits for running copies, then closes the window. `frame`: of its step call.

        A nested call (a step that calls super().step()) is part of the outer one.
        """
        with self._changed:
            if optimizer in self._updates and self._updates[optimizer].is_on(frame.f_back):
                return
            self._open_step = None  # no further copy begins while this update waits for those that run
            if not self._wait_for_copies(max([copy.until for copy in self._copies], default=0.0) - self._clock()):
                for copy in self._copies:
                    copy.void = True
            self._open_step = None  # a mark that was under way may have opened it
            self._updates[optimizer] = _Update.of(frame)

    def after_step(self, optimizer: int, frame: FrameType) -> bool:
        """An optimizer has stepped; True when `frame` was the outermost step call, so that this counts as an update."""
        with self._changed:
            if self._updates.get(optimizer) != _Update.of(frame):
                return False
            del self._updates[optimizer]
            return True

    def _begin(self, what: str, step: int | None = None) -> _Copy:
        copy = _Copy(what, self._clock() + self.hold_limit_s, step)
        self._copies.append(copy)
        return copy

    def _end(self, copy: _Copy) -> None:
        with self._changed:
            self._copies.remove(copy)
            self._changed.notify_all()

    def _wait_for_copies(self, limit_s: float) -> bool:
        """Waits until no copy runs; False when `limit_s` seconds have passed."""
        until = self._clock() + limit_s
        while self._copies:
            left = until - self._clock()
            if left <= 0:
                return False
            self._changed.wait(left)
        return True

    def _require(self, step: int) -> None:
        if self._open_step == step:
            return
        if self._open_step is not None:
            state = f"the window of step {self._open_step} is open"
        elif self._updates:
            state = "its next update has begun"
        else:
            state = "no window is open (its next update has begun, or end_step was not called yet)"
        raise WindowClosedError(
            f"member {self.member}: the state of step {step} cannot be copied now, {state}. Nothing was copied; the "
            "save waits for the next end_step.",
            member=self.member,
            step=step,
            open_step=self._open_step,
        )

    def _refuse_in_update(self, what: str) -> None:
        for update in self._updates.values():
            if update.is_on(sys._current_frames().get(update.thread)):
                raise WindowClosedError(
                    f"member {self.member}: {what}, an optimizer update is running. Nothing was captured; call "
                    "end_step when the update has returned.",
                    member=self.member,
                )
            raise SnapshotError(
                f"member {self.member}: {what}, the last optimizer step began and never ended (it raised), so its "
                "weights may be half updated. Nothing was captured; the previous checkpoint stands. Resume from it, "
                "or finish an update first.",
                member=self.member,
            )

    def _refuse_void(self, copy: _Copy) -> None:
        if copy.void:
            raise DeadlineError(
                f"member {self.member}: {copy.what} took so long that the update which waited for it (up to "
                f"{self.hold_limit_s:.0f} s) went on, so what was copied is void and not used. The previous checkpoint "
                "stands; look for what slows the copy (memory pressure, a stopped thread).",
                member=self.member,
                waited_s=self.hold_limit_s,
            )

    def _late(self, what: str, waited_s: float) -> DeadlineError:
        running = ", ".join(copy.what for copy in self._copies)
        return DeadlineError(
            f"member {self.member}: {what} waited {waited_s:.1f} s for {running}, which still runs. Nothing was "
            "captured; look for what slows the copy, or allow more time.",
            member=self.member,
            waited_s=waited_s,
        )
