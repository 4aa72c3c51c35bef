"""One trial: a run is started, broken as its plan says, brought back as a user would, finished, and judged.

The conductor never sleeps for something to be over: it goes round, reads the driver's journal, strikes when a moment
has come, ends holds, starts what is down again, and fails the trial when nothing has moved for STUCK_S.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.chaos.breaker import Breaker, Hold, lives
from tests.chaos.field import Field
from tests.chaos.journal import Entry, Reader
from tests.chaos.judge import judge
from tests.chaos.plan import PHASES, RESUMING, Fault, Plan
from tests.chaos.roots import Roots
from tests.chaos.trainer import Errand

ROUND_S = 0.01
STUCK_S = 150.0
LIMIT_S = 600.0
GIVE_UP_STEPS = 6  # a point that was not passed in so many steps is given up
CALM_STEPS = 2  # steps after the last fault, before the finale
MISSING_S = 5.0  # how long a victim may be away when its moment has come
OPTIONS = {
    "save_freq": 1,
    "heartbeat_s": 0.5,
    "linger_s": 120,
    "snapshot_deadline_s": 6,
    "stage_deadline_s": 6,
    "accept_deadline_s": 6,
    "save_deadline_s": 25,
    "upload_deadline_s": 20,
    "register_deadline_s": 40,
    "resume_deadline_s": 60,
    "max_consecutive_failures": 1000,
}
IN_MEMORY = {"save_freq": 3, "snapshot_freq": 1}


class TrialError(Exception):
    """The trial found something wrong."""


@dataclass
class Struck:
    """One fault, and what became of it."""

    fault: Fault
    fired: bool = False
    victim: str = ""  # who truly was hit
    phase: str = ""
    hit: str = ""
    fired_at: float = 0.0  # seconds since 1970


@dataclass
class Conduct:
    """One trial under way."""

    plan: Plan
    field: Field
    folder: Path
    struck: list[Struck] = dataclasses.field(default_factory=list)
    lives: int = 0  # drivers started
    entries: list[Entry] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)  # how drivers ended
    by_hand: list[str] = dataclasses.field(default_factory=list)  # what came of the witness's own saves

    def __post_init__(self) -> None:
        self.run = f"chaos-{self.plan.seed}-{self.plan.trial}"
        self.folder.mkdir()
        (self.folder / "store").mkdir()
        self.roots = Roots(self.folder, self.run, self.field.slots)
        self.journal = Reader(self.folder / "journal.jsonl")
        self.witness = Reader(self.folder / "witness.jsonl")
        self.breaker = Breaker(self.field, self.folder, self.run, self._driver)
        self._pid: int | None = None
        self._driver_slot = 0
        self._finale = self.folder / "finale"
        self._moved = time.monotonic()
        self._began = time.time()
        self._since: list[Entry] = []  # journal entries since the fault before
        self._armed_steps: int | None = None  # steps ended when the point was armed
        self._moment_at: float | None = None  # when the moment came
        self._passed_at: float | None = None  # when the point was seen to have been passed, by one that it killed
        self._releases: list[Hold] = []  # of whoever stands still at a point; the next point may come before its time
        self._before: dict[int, str] = {}
        self._calm_from = 0
        self._restart_at: dict[int, float] = {}  # slot -> when its raylet is started again

    # -- the whole

    def __call__(self) -> None:
        """Raises TrialError with what went wrong."""
        for left in self.field.failpoints.iterdir():
            left.unlink()
        until = time.monotonic() + LIMIT_S
        self._start_driver()
        while not self._closed():
            self._round()
            if time.monotonic() > until or time.monotonic() - self._moved > STUCK_S:
                raise TrialError(f"stuck: {self._where()}")
            time.sleep(ROUND_S)
        self.breaker.let_go()
        judge(self)

    def _round(self) -> None:
        now = time.time()
        news = self.journal.news()
        if news:
            self._moved = time.monotonic()
            self.entries += news
            self._since += news
            self.errors += [f"{e['event']}: {e['error'].splitlines()[0]}" for e in news if "error" in e]
        for entry in self.witness.news():
            if entry["event"] != "committed":
                self.by_hand.append(entry["why"].splitlines()[0])
                continue
            if "by_hand" in entry:
                self.by_hand.append("committed")
            self.roots.note(entry["attempt"], entry["step"], tuple(entry["order"]), now, "witness")
        self.roots.look(now)
        self.breaker.tend()
        for release in [each for each in self._releases if each.until <= time.monotonic()]:
            release.mend()
            self._releases.remove(release)
        self._strike_when_due()
        self._bring_back()
        self._maybe_end()

    # -- breaking

    @property
    def _pending(self) -> Fault | None:
        done = len(self.struck)
        return self.plan.faults[done] if done < len(self.plan.faults) else None

    def _count(self, event: str) -> int:
        return sum(entry["event"] == event for entry in self._since)

    def _strike_when_due(self) -> None:
        fault = self._pending
        if fault is None:
            return
        if self._moment_at is None:
            if self._count(fault.moment.event) < fault.moment.count:
                self._give_up_if_late(fault)
                return
            self._moment_at = time.monotonic()
            if fault.moment.point is not None:
                self._before = self.breaker.everybody()
                self.breaker.arm(fault.moment.point, "kill" if fault.at_its_own_point else "pause")
                self._armed_steps = self._ended()
        point = fault.moment.point
        if point is None:
            if time.monotonic() >= self._moment_at + fault.moment.delay_s:
                self._strike(fault, self._phase())
        elif self.breaker.fired(point):
            if fault.at_its_own_point:
                self._died_at(fault, PHASES[point])
            else:
                time.sleep(fault.moment.delay_s)
                self._strike(fault, PHASES[point])
        elif self._ended() - (self._armed_steps or 0) >= GIVE_UP_STEPS and self._may_give_up(point):
            self._over(Struck(fault))

    def _may_give_up(self, point: str) -> bool:
        """Whether nobody is going to pass this point any more, and nobody just has."""
        return (point not in RESUMING or self._closing()) and self.breaker.disarm(point)

    def _give_up_if_late(self, fault: Fault) -> None:
        if fault.moment.event in ("finale", "durable"):
            return
        if self._closing() or (fault.moment.event not in ("step", "ended") and self._ended() >= GIVE_UP_STEPS):
            self._over(Struck(fault))

    def _strike(self, fault: Fault, phase: str) -> None:
        hit = self.breaker.strike(fault)
        if hit is None:
            assert self._moment_at is not None
            if time.monotonic() < self._moment_at + MISSING_S and fault.moment.point is None:
                return  # it may be on its way back
            self._let_point_go(fault, 0.0)
            self._over(Struck(fault))
            return
        if fault.kind == "kill" and fault.victim in ("raylet", "node"):
            self._restart_at[fault.target] = time.monotonic() + fault.hold_s
        self._let_point_go(fault, min(fault.hold_s, 1.0) / 2 + fault.moment.delay_s)
        self._over(Struck(fault, True, fault.victim, phase, hit, time.time()))

    def _died_at(self, fault: Fault, phase: str) -> None:
        """Somebody died at an armed point: who?"""
        dead = {pid: kind for pid, kind in self._before.items() if not lives(pid)}
        self._passed_at = self._passed_at or time.monotonic()
        if not dead and time.monotonic() < self._passed_at + MISSING_S:
            self._before.update(self.breaker.everybody())  # whoever passed it may be younger than the moment
            return
        pid, kind = next(iter(dead.items()), (0, fault.victim))  # or was born and died between two looks
        self._over(Struck(fault, True, kind, phase, f"pids [{pid}]" if pid else "unseen", time.time()))

    def _let_point_go(self, fault: Fault, delay_s: float) -> None:
        point = fault.moment.point
        if point is not None:
            self._releases.append(Hold(time.monotonic() + delay_s, lambda: self.breaker.release(point)))

    def _over(self, struck: Struck) -> None:
        self.struck.append(struck)
        self._since = []
        self._moment_at = None
        self._passed_at = None
        self._armed_steps = None

    def _phase(self) -> str:
        """What the run is at, by what the driver told last and by what lies on the disks."""
        last = self.entries[-1]["event"] if self.entries else "none"
        if last in ("none", "born", "joined", "attached", "ranks", "trouble", "failed"):
            return "start"
        if last in ("registered", "finale"):
            return "resume"
        if last == "durable":
            return "close"
        at_rest = self.roots.phase()
        if at_rest is not None:
            return at_rest
        return "snapshot" if last == "step" else "update"

    # -- bringing back

    def _driver(self) -> int | None:
        return self._pid if self._pid is not None and lives(self._pid) else None

    def _start_driver(self) -> None:
        wanted = self.plan.driver_slot
        down = {*self.field.down(), *self.breaker.cut}
        self._driver_slot = 0 if wanted in down else wanted
        self.lives += 1
        errand = Errand(
            self.field.address,
            self.field.node_address(self._driver_slot),
            self.run,
            str(self.folder),
            self.plan.rank_slots,
            {
                **OPTIONS,
                **(IN_MEMORY if self.plan.in_memory else {}),
                "save_total_limit": self.plan.save_total_limit,
                "snapshot": self.plan.snapshot,
            },
            self.plan.queue,
            self.plan.mends_itself,
        )
        path = self.folder / f"errand-{self.lives}.json"
        errand.write(path)
        log = self.folder / "driver.log"
        self._pid = self.field.start("tests.chaos.trainer", str(path), log, self._driver_slot)

    def _bring_back(self) -> None:
        if self.field.raylet(0) is None:  # everything was killed
            self.breaker.holds.clear()
            self.breaker.cut.clear()
            self._restart_at.clear()
            self.field.raze()
            self.field.build()
            self._moved = time.monotonic()
        for slot in self.field.down():
            if time.monotonic() < self._restart_at.get(slot, 0.0) or slot in self.breaker.cut:
                continue
            self._restart_at.pop(slot, None)
            self.field.lose(slot)
            if slot == self._driver_slot and self._driver() is not None:
                assert self._pid is not None
                self.breaker.end(self._pid)  # its machine was lost
            self.field.add(slot)
        if self._driver() is None and not self._closed():
            self.entries += self.journal.news()
            if not self._closed():
                self._start_driver()

    # -- ending

    def _ended(self) -> int:
        return sum(entry["event"] == "ended" for entry in self.entries)

    def _closing(self) -> bool:
        return self._finale.exists()

    def _closed(self) -> bool:
        return any(entry["event"] == "closed" for entry in self.entries)

    def _maybe_end(self) -> None:
        fault = self._pending
        waits_for_end = fault is not None and (
            fault.moment.event in ("finale", "durable")
            or (fault.moment.point in RESUMING and self._armed_steps is not None)
        )
        busy = bool(self.breaker.holds or self._restart_at or self._releases)
        if busy or (fault is not None and not waits_for_end):
            self._calm_from = self._ended()
            return
        if self._closing() or self._ended() - self._calm_from < CALM_STEPS:
            return
        self._finale.touch()
        pid = self._driver()
        if self.plan.new_driver_at_the_end and pid is not None:
            self.breaker.end(pid)

    def images(self) -> list[Path]:
        """Folders of the run's images in shared memory."""
        return list(Path("/dev/shm").glob(f"lastgood.{os.getuid()}.{self.run}.*"))

    def _where(self) -> str:
        last = self.entries[-1] if self.entries else None
        facts = {
            "last entry": None if last is None else {k: v for k, v in last.items() if k != "digests"},
            "driver": self._driver(),
            "down": self.field.down(),
            "fault pending": str(self._pending),
            "errors": self.errors[-3:],
        }
        return json.dumps(facts, default=str)

    def _timeline(self) -> list[tuple[float, str]]:
        """Seconds since the start, and what the driver told or what was done to the run then."""
        told = [(e["at"], f"{e['event']} {e.get('step', '')}".strip()) for e in self.entries]
        done = [(one.fired_at, f"* {one.fault}") for one in self.struck if one.fired]
        return [(round(at - self._began, 2), what) for at, what in sorted(told + done)]

    def record(self, took_s: float, why: str | None) -> dict[str, Any]:
        """What is kept of the trial: one JSON object."""
        return {
            "seed": self.plan.seed,
            "trial": self.plan.trial,
            "ok": why is None,
            "why": why,
            "plan": asdict(self.plan),
            "faults": [
                {
                    "victim": one.victim or one.fault.victim,
                    "kind": one.fault.kind,
                    "phase": one.phase,
                    "point": one.fault.moment.point,
                    "fired": one.fired,
                    "hit": one.hit,
                }
                for one in self.struck
            ],
            "took_s": round(took_s, 2),
            "lives": self.lives,
            "steps": self._ended(),
            "commits": len(self.roots.seen),
            "errors": self.errors,
            "by_hand": {"asked": len(self.by_hand), "committed": self.by_hand.count("committed")},
            "timeline": self._timeline(),
        }
