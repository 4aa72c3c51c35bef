"""What is done in a trial, drawn from its seed and number alone: who is broken, how, at which moment, for how long.

A moment is an entry of the driver's journal (the n-th after the fault before), then either a failpoint that some
process passes from then on, or a short delay. So the same plan meets the same situation as nearly as separate
processes allow.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

# Failpoint -> the phase of a save (or of what surrounds it) in which it is passed. Every save passes these.
POINTS = {
    "member.mark": "mark",
    "coordinator.snapshot": "snapshot",
    "stager.snapshot.begin": "snapshot",
    "member.snapshot": "snapshot",
    "member.copy": "snapshot",
    "stager.snapshot.sealed": "snapshot",
    "coordinator.stage": "stage",
    "stager.stage.begin": "stage",
    "storage.write_image.begin": "stage",
    "storage.write_image.middle": "stage",
    "storage.write_image.before_fsync": "stage",
    "stager.stage.written": "stage",
    "coordinator.staged": "accept",
    "coordinator.build_manifest": "accept",
    "coordinator.accept": "accept",
    "stager.record.accept": "accept",
    "coordinator.publish": "publish",
    "stager.publish.before_completed": "publish",
    "stager.publish.after_completed": "publish",
    "coordinator.write_ledger": "publish",
    "coordinator.upload": "upload",
    "stager.upload.shard": "upload",
    "storage.put_file.middle": "upload",
    "storage.put_file.before_link": "upload",
    "coordinator.complete_remotely": "complete",
    "coordinator.note_durable": "complete",
    "storage.create_once.before_link": "small file",
    "storage.create_once.after_link": "small file",
    "storage.replace.before_rename": "small file",
}
PAUSING = {  # only where a component asks for pause and release
    "coordinator.pause": "pause",
    "member.pause": "pause",
    "coordinator.release": "release",
    "member.release": "release",
}
SAVING = (  # from here on a snapshot is whole in memory, and not yet committed
    "stager.snapshot.sealed",
    "coordinator.stage",
    "stager.stage.begin",
    "storage.write_image.middle",
    "stager.stage.written",
    "coordinator.staged",
    "coordinator.accept",
    "stager.record.accept",
)
COLLECTING = {"stager.collect.tombstone": "retention"}
ABORTING = {"coordinator.refuse": "abort", "stager.record.refuse": "abort", "coordinator.discard": "abort"}
RESUMING = {"member.load": "resume", "member.apply": "resume", "member.forget": "resume", "member.reopen": "recovery"}
PHASES = {**POINTS, **PAUSING, **COLLECTING, **ABORTING, **RESUMING}


def is_passed_by(point: str, victim: str) -> bool:
    """Whether a victim's process passes the point; files are written by stagers and by the coordinator."""
    owner = point.split(".")[0]
    return owner == victim or (owner == "storage" and victim in ("stager", "coordinator"))


VICTIMS = {
    "member": 20,
    "driver": 14,
    "stager": 20,
    "coordinator": 20,
    "services": 6,
    "raylet": 14,
    "node": 6,
    "run": 4,
    "cluster": 2,
}
SAID = {  # for people
    "member": "a rank",
    "driver": "the driver",
    "stager": "a stager",
    "coordinator": "the coordinator",
    "services": "the coordinator and all stagers",
    "raylet": "a raylet",
    "node": "a node: raylet and all its processes",
    "run": "everything of the run",
    "cluster": "everything, Ray included",
}
AT_ONCE = ("ended", 0)  # the event and count of a moment that comes with the fault before: recovery is disturbed
KINDS = {"kill": "SIGKILL", "stop": "SIGSTOP, continued later", "cut": "cut off the network, mended later"}


@dataclass(frozen=True)
class Moment:
    """When a fault comes: after `count` entries `event` of the journal, at `point`, or `delay_s` later."""

    event: str
    count: int = 1
    point: str | None = None
    delay_s: float = 0.0  # after the event; with a point, between the process's stop there and the fault

    def __str__(self) -> str:
        when = f"after {self.event} {self.count}" if self.count else "at once"
        return f"{when}, at {self.point}" if self.point else f"{when}, {self.delay_s * 1000:.0f} ms later"


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    victim: str
    kind: str
    moment: Moment
    target: int = 0  # which of several; a slot for raylets, nodes and stagers, a rank for members
    hold_s: float = 0.0  # until it is continued, mended, or the raylet is started again

    @property
    def at_its_own_point(self) -> bool:
        """Whether the process that passes the point is the one to die: exact to the instruction."""
        return self.moment.point is not None and self.kind == "kill" and is_passed_by(self.moment.point, self.victim)

    def __str__(self) -> str:
        hold = f" for {self.hold_s:.1f} s" if self.hold_s else ""
        return f"{self.kind} {self.victim} {self.target}{hold} {self.moment}"


@dataclass(frozen=True)
class Plan:
    """One trial."""

    seed: int
    trial: int
    slots: int
    faults: tuple[Fault, ...] = ()
    driver_slot: int = 0
    save_total_limit: int | None = None
    queue: bool = False  # the driver has a component that asks for pause
    mends_itself: bool = False  # the driver replaces dead ranks by itself
    new_driver_at_the_end: bool = False
    witnessed: bool = False  # another job looks on and saves by hand (which also wakes a coordinator)
    rank_slots: tuple[int, ...] = field(default=(0, 1))
    snapshot: str = "blocking"
    in_memory: bool = False  # every step is kept in memory, and every third is saved; else every step is saved

    def __str__(self) -> str:
        how = (", overlapped" if self.snapshot == "overlapped" else "") + (", in memory" if self.in_memory else "")
        return f"seed {self.seed} trial {self.trial}{how}: " + "; then ".join(map(str, self.faults))


def draw(seed: int, trial: int, *, slots: int, cuttable: bool) -> Plan:
    """The plan of a trial. `cuttable`: slots have networks of their own, so that one can be cut off or lost whole."""
    dice = random.Random(f"{seed}:{trial}")
    queue = dice.random() < 0.4
    limit = dice.choice((None, None, 2, 3))
    mends_itself = dice.random() < 0.6
    driver_slot = 1 if cuttable and dice.random() < 0.4 else 0
    points = {**POINTS, **(PAUSING if queue else {}), **(COLLECTING if limit else {})}
    faults = [_fault(dice, list(points), cuttable, slots, first=True)]
    if dice.random() < 0.15:
        faults = _pair(dice, slots)
    elif dice.random() < 0.5:
        later = [*points, *ABORTING, *RESUMING, *RESUMING]
        faults.append(_fault(dice, later, cuttable, slots, first=False))
    return Plan(
        seed,
        trial,
        slots,
        tuple(faults),
        driver_slot,
        limit,
        queue,
        mends_itself,
        dice.random() < 0.25,
        dice.random() < 0.6,
        tuple(range(slots - 2, slots)),
        dice.choice(("blocking", "overlapped")),
        dice.random() < 0.35,
    )


def _pair(dice: random.Random, slots: int) -> list[Fault]:
    """A fault that makes the run do something rare, and one in the midst of that: it aborts an attempt, or a new
    coordinator takes over an open window, or what a process that died has trained is to be saved without it."""
    rare = dice.choices(("abort", "window", "rescue"), (4, 2, 4))[0]
    slot = dice.randrange(slots - 2, slots)
    second, point, delay_s = dice.choice(("stager", "coordinator", "member", "driver")), None, dice.uniform(0.0, 0.05)
    if rare == "abort":
        victim, at = dice.choice(
            (("member", "member.copy"), ("stager", "stager.snapshot.sealed"), ("stager", "storage.write_image.middle"))
        )
        point = dice.choice(list(ABORTING))
    elif rare == "window":
        victim = "coordinator"
        at = dice.choice(("coordinator.upload", "coordinator.complete_remotely", "coordinator.note_durable"))
        point = "member.reopen"
    else:
        victim, at = dice.choice(("member", "driver")), dice.choice(SAVING)
        second = dice.choices(("coordinator", "services", "driver", "member"), (6, 2, 2, 2))[0]
        delay_s = dice.choice((delay_s, dice.uniform(0.0, 1.0)))
    first = Fault(victim, "kill", Moment("ended", dice.randint(1, 3), at), slot if victim == "stager" else 0)
    kind = "kill" if rare == "rescue" else _kind(dice, second, cuttable=False)
    target = slot if second == "stager" else dice.randrange(2)
    return [first, Fault(second, kind, Moment(*AT_ONCE, point, delay_s), target, _hold_s(dice, second, kind))]


def _fault(dice: random.Random, points: Sequence[str], cuttable: bool, slots: int, *, first: bool) -> Fault:
    weights = {name: weight for name, weight in VICTIMS.items() if cuttable or name != "node"}
    victim = dice.choices(list(weights), list(weights.values()))[0]
    kind = _kind(dice, victim, cuttable)
    if victim in ("raylet", "node"):
        target = dice.randrange(1, slots)
    elif victim == "stager":
        target = dice.randrange(slots - 2, slots)
    else:
        target = dice.randrange(2)
    return Fault(victim, kind, _moment(dice, points, victim, first=first), target, _hold_s(dice, victim, kind))


def _kind(dice: random.Random, victim: str, cuttable: bool) -> str:
    if victim in ("node", "cluster"):
        return "kill"
    if victim == "raylet":
        return dice.choices(("kill", "stop", "cut"), (4, 3, 5 if cuttable else 0))[0]
    return dice.choices(("kill", "stop"), (6, 4))[0]


def _moment(dice: random.Random, points: Sequence[str], victim: str, *, first: bool) -> Moment:
    if dice.random() < 0.65:
        own = [point for point in points if is_passed_by(point, victim)]
        point = dice.choice(own if own and dice.random() < 0.5 else points)
        event, count = ("ended", dice.randint(1, 3)) if first or dice.random() < 0.5 else AT_ONCE
        if point in RESUMING:
            event, count = AT_ONCE
        return Moment(event, count, point, dice.uniform(0.0, 0.05))
    if first and dice.random() < 0.2:
        return Moment(dice.choice(("born", "joined", "attached", "ranks", "registered")), 1, None, dice.uniform(0, 0.5))
    if dice.random() < 0.15:
        return Moment(dice.choice(("finale", "durable")), 1, None, dice.uniform(0, 0.5))
    if not first and dice.random() < 0.5:
        return Moment(*AT_ONCE, None, dice.uniform(0.0, 4.0))
    return Moment("step", dice.randint(1, 4), None, dice.uniform(0, 0.4))


def _hold_s(dice: random.Random, victim: str, kind: str) -> float:
    if kind == "kill":
        return dice.uniform(0.0, 2.0) if victim in ("raylet", "node") else 0.0
    if victim == "raylet":  # shorter or longer than Ray waits for a node
        return dice.choice((dice.uniform(0.5, 3.0), dice.uniform(8.0, 11.0)))
    return dice.choices((dice.uniform(0.1, 0.8), dice.uniform(1.0, 3.0), dice.uniform(5.0, 8.0)), (4, 4, 2))[0]
