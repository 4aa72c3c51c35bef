"""Breaks what a plan names, and mends it again. Finds its victims through /proc: they need not answer.

Nothing is counted that did not happen: a fault has fired when a process has died or stopped, or a cable is down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lastgood.storage import failpoints
from tests.chaos.field import Field
from tests.chaos.plan import Fault

GONE_S = 10.0
TITLES = {"member": "Rank", "stager": "StagerActor", "coordinator": "CoordinatorActor"}


@dataclass
class Hold:
    """Something that was stopped or cut, until `until` (monotonic seconds)."""

    until: float
    mend: Callable[[], None]


@dataclass
class Breaker:
    """One trial's faults at work. Used by one thread; `tend` often."""

    field: Field
    folder: Path  # of the trial
    run: str
    driver: Callable[[], int | None]  # its pid, while it lives
    holds: list[Hold] = dataclasses.field(default_factory=list)
    cut: set[int] = dataclasses.field(default_factory=set)  # slots that are cut off now

    # -- finding

    def find(self, victim: str, target: int) -> list[int]:
        """Pids of a victim; empty when it is not there now."""
        if victim == "driver":
            pid = self.driver()
            return [] if pid is None else [pid]
        if victim == "raylet":
            pid = self.field.raylet(target)
            return [] if pid is None else [pid]
        if victim == "node":
            return self.field.in_slot(target)
        if victim == "cluster":
            return [pid for pid in self.field.processes() if pid != self.field.nursery.pid]
        if victim == "run":
            found = [pid for title in TITLES.values() for pid in self.field.named(title)]
            return [*found, *self.find("driver", 0)]
        if victim == "services":
            return [pid for kind in ("coordinator", "stager") for pid in self.field.named(TITLES[kind])]
        found = self.field.named(TITLES[victim])
        if victim == "stager":
            return [pid for pid in found if self._slot_of_stager(pid) == target]
        if victim == "member":
            return found[target : target + 1] or found[:1]
        return found

    def everybody(self) -> dict[int, str]:
        """Pid -> kind of every process that a point can stop."""
        found = {pid: kind for kind, title in TITLES.items() for pid in self.field.named(title)}
        return {**found, **dict.fromkeys(self.find("driver", 0), "driver")}

    def _slot_of_stager(self, pid: int) -> int | None:
        """By the lock of the staging directory that it holds open."""
        for slot in range(self.field.slots):
            lock = str(self.folder / f"node-{slot}" / self.run / "lock")
            with contextlib.suppress(OSError):
                for entry in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if str(entry.readlink()) == lock:
                            return slot
        return None

    # -- breaking

    def strike(self, fault: Fault) -> str | None:
        """Does it now. Answers what was hit, or None when the victim is not there."""
        if fault.kind == "cut":
            network = self.field.network
            if network is None or fault.target in self.cut:
                return None
            network.cut(fault.target)
            self.cut.add(fault.target)
            self._hold(fault.hold_s, lambda: self._mend(fault.target))
            return f"slot {fault.target}"
        pids = self.find(fault.victim, fault.target)
        if not pids:
            return None
        if fault.kind == "kill":
            hit = [pid for pid in pids if _send(pid, signal.SIGKILL)]
            self._wait_gone(hit)
            return f"pids {hit}" if hit else None
        hit = [pid for pid in pids if _send(pid, signal.SIGSTOP)]
        self._hold(fault.hold_s, lambda: [_send(pid, signal.SIGCONT) for pid in hit])
        return f"pids {hit}" if hit else None

    def _hold(self, hold_s: float, mend: Callable[[], object]) -> None:
        self.holds.append(Hold(time.monotonic() + hold_s, lambda: (mend(), None)[1]))

    def _mend(self, slot: int) -> None:
        assert self.field.network is not None
        self.field.network.mend(slot)
        self.cut.discard(slot)

    def _wait_gone(self, pids: Iterable[int]) -> None:
        until = time.monotonic() + GONE_S
        left = set(pids)
        while left:
            left = {pid for pid in left if lives(pid)}
            for slot in range(self.field.slots):
                self.field.raylet(slot)  # reaps it
            if time.monotonic() > until:
                raise TimeoutError(f"SIGKILL did not end {sorted(left)}")
            time.sleep(0.005)

    def end(self, pid: int) -> None:
        """SIGKILLs a process that is not a fault's victim, and waits until it is gone."""
        _send(pid, signal.SIGKILL)
        self._wait_gone([pid])

    def tend(self) -> None:
        """Ends the holds whose time is over."""
        now = time.monotonic()
        over = [hold for hold in self.holds if hold.until <= now]
        self.holds = [hold for hold in self.holds if hold.until > now]
        for hold in over:
            hold.mend()

    def let_go(self) -> None:
        """Ends every hold and every pause, whatever time it has left."""
        for hold in self.holds:
            hold.mend()
        self.holds = []
        for path in self.field.failpoints.iterdir():
            if path.suffix == ".fired":
                path.with_suffix(".go").touch()

    # -- points

    def arm(self, point: str, action: str) -> None:
        for suffix in ("fired", "go"):
            (self.field.failpoints / f"{point}.{suffix}").unlink(missing_ok=True)
        failpoints.arm(self.field.failpoints, point, action)

    def disarm(self, point: str) -> bool:
        """Answers False when it has just been passed."""
        try:
            (self.field.failpoints / point).unlink()
        except FileNotFoundError:
            return False
        return True

    def fired(self, point: str) -> bool:
        return failpoints.fired(self.field.failpoints, point)

    def release(self, point: str) -> None:
        failpoints.release(self.field.failpoints, point)


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
