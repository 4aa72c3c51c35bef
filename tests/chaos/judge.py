"""Judges a trial after its run was closed: what was promised, held against the disks, the journal and /proc.

Reads the files with lastgood's own verify, and asks nobody. Every sentence that comes back is a broken promise.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastgood.client import at_rest
from lastgood.storage import verify
from lastgood.storage.files import is_temporary
from lastgood.storage.layout import COMPLETED, parse_step_name
from lastgood.storage.manifest import LedgerEntry, Record
from lastgood.storage.verify import RejectKind, find_committed

if TYPE_CHECKING:
    from tests.chaos.trial import Conduct

OUTLIVED = ("member", "driver", "coordinator")  # what is in memory outlives their death
LEFT_S = 20.0  # how long lastgood's processes may take to go after close


def judge(trial: Conduct) -> None:
    """Raises TrialError with every promise that was broken."""
    from tests.chaos.trial import TrialError

    broken = [
        sentence
        for look in (
            _exact,
            _resumed_newest,
            _nothing_trained_twice,
            _verified,
            _kept,
            _one_per_sequence,
            _nothing_left,
        )
        for sentence in look(trial)
    ]
    if broken:
        raise TrialError("\n".join(broken))


def _states(trial: Conduct) -> dict[int, set[tuple[Any, ...]]]:
    """Step -> every state that was written down at its end."""
    states: dict[int, set[tuple[Any, ...]]] = defaultdict(set)
    for entry in trial.entries:
        if entry["event"] == "step":
            states[entry["step"]].add(_state(entry))
    return states


def _state(entry: dict[str, Any]) -> tuple[Any, ...]:
    return (*entry["digests"], entry["seen"], entry["taken"])


def _exact(trial: Conduct) -> Iterator[str]:
    """Every life of the run came to the same states, and what was resumed is what was saved."""
    states = _states(trial)
    for step, found in states.items():
        if len(found) != 1:
            yield f"step {step} ended in {len(found)} different states: training is not the same after a resume"
    for entry in trial.entries:
        if entry["event"] == "resumed" and entry["step"] and {_state(entry)} != states[entry["step"]]:
            yield f"what was resumed as step {entry['step']} is not the state that was recorded: {entry}"


def _resumed_newest(trial: Conduct) -> Iterator[str]:
    """The last resume took the newest commit there was; an earlier one that did not has said why."""
    last = max(i for i, entry in enumerate(trial.entries) if entry["event"] == "resumed")
    for index, entry in enumerate(trial.entries):
        if entry["event"] != "resumed":
            continue
        final = index == last
        registered = next(e["at"] for e in reversed(trial.entries[:index]) if e["event"] == "registered")
        known = [seen for seen in trial.roots.seen.values() if seen.at < registered]
        if not known:
            continue
        newest = max(known, key=lambda seen: seen.order)
        got = trial.roots.seen.get(entry["attempt"])
        order = got.order if got is not None else (0, 0)
        told = entry["lost"] or entry["rejected"]
        if order < newest.order and (final or not told):
            yield (
                f"resumed from step {entry['step']} ({entry['attempt']}) although step {newest.step} "
                f"({newest.attempt}, seen at {sorted(newest.where)}) was committed; told: {told}"
            )
        if final and told:
            yield f"with every node back, the last resume still says: {told}"


def _nothing_trained_twice(trial: Conduct) -> Iterator[str]:
    """As long as the stagers live, a step that end_step said is in memory outlives ranks, drivers and coordinators."""
    last = 0
    for entry in trial.entries:
        if entry["event"] == "ended" and entry["in_memory"]:
            last = entry["step"]
        if entry["event"] != "resumed":
            continue
        fired = [one for one in trial.struck if one.fired and one.fired_at < entry["at"]]
        if any(one.fault.kind != "kill" or one.victim not in OUTLIVED for one in fired):
            return
        if entry["step"] < last:
            yield f"resumed from step {entry['step']} although step {last} was in memory, and no stager was harmed"


def _verified(trial: Conduct) -> Iterator[str]:
    """Whatever is visible as committed, in any root, is whole; the newest one is what COMPLETED says."""
    for root in trial.roots.all():
        found = find_committed(root / trial.run)
        for one in found.rejected:
            if one.kind not in (RejectKind.COLLECTED,):
                yield f"{root.name}: {one.kind.value}: {one.path}: {one.reason}"
        if not found.committed:
            continue
        for one in at_rest.verify(str(root / trial.run))[0]:
            if one.findings:
                yield f"{root.name}: step {one.checkpoint.step}: {[str(each) for each in one.findings]}"
    if not find_committed(trial.roots.store / trial.run).committed:
        yield "the store holds no committed checkpoint"


def _kept(trial: Conduct) -> Iterator[str]:
    """Every commit that was ever observed stands in the store, or retention has let it go."""
    found = find_committed(trial.roots.store / trial.run)
    there = {one.completed.attempt for one in found.committed}
    collected = {one.path.name for one in found.rejected if one.kind is RejectKind.COLLECTED}
    orders = sorted((one.order for one in found.committed), reverse=True)
    for seen in trial.roots.seen.values():
        if seen.changed:
            yield f"{seen.attempt}: {seen.changed}"
        if seen.attempt in there:
            continue
        limit = trial.plan.save_total_limit
        if seen.attempt not in collected or limit is None:
            yield f"step {seen.step} ({seen.attempt}) was committed, seen at {sorted(seen.where)}, and is lost"
        elif sum(order > seen.order for order in orders) < limit:
            yield f"step {seen.step} ({seen.attempt}) was collected though fewer than {limit} newer ones are kept"


def _one_per_sequence(trial: Conduct) -> Iterator[str]:
    """Records, COMPLETED and the ledger tell one story."""
    records: dict[str, dict[str, Record]] = defaultdict(dict)
    committed: dict[tuple[int, int], set[str]] = defaultdict(set)
    digests: dict[str, set[str]] = defaultdict(set)
    visible: set[str] = set()
    for root in trial.roots.all():
        for one in find_committed(root / trial.run).committed:
            committed[one.order].add(one.completed.attempt)
            digests[one.completed.attempt].add(one.completed.manifest_sha256)
            visible.add(one.completed.attempt)
        for path in (root / trial.run / "records").glob("*.json"):
            record = Record.from_bytes(path.read_bytes(), where=str(path))
            records[record.head.attempt][root.name] = record
        for path in (root / trial.run / "ledger").glob("*.json"):
            entry = LedgerEntry.from_bytes(path.read_bytes(), where=str(path))
            committed[entry.epoch, entry.sequence].add(entry.attempt)
            digests[entry.attempt].add(entry.manifest_sha256)
    for order, attempts in committed.items():
        if len(attempts) > 1:
            yield f"(epoch, sequence) {order} was committed as {sorted(attempts)}"
    for attempt, found in digests.items():
        if len(found) > 1:
            yield f"{attempt} was committed with {len(found)} manifests"
    for attempt, at in records.items():
        said = {name: record.state for name, record in at.items()}
        if "refuse" in said.values() and (attempt in visible or attempt in trial.roots.seen):
            yield f"{attempt} is committed although its records say {said}"
        if "refuse" not in said.values() and attempt not in visible:
            yield f"{attempt} was accepted ({said}) and is neither committed nor refused"


def _nothing_left(trial: Conduct) -> Iterator[str]:
    """No process, image, unfinished file or attempt of the run is left behind."""
    until = time.monotonic() + LEFT_S
    while True:
        titles = {title: trial.field.named(title) for title in ("StagerActor", "CoordinatorActor")}
        shared = trial.images()
        if not any(titles.values()) and not shared:
            break
        if time.monotonic() > until:
            yield f"left behind after close: {titles}, {[str(path) for path in shared]}"
            break
        time.sleep(0.05)
    for root in trial.roots.all():
        for place, folders, names in os.walk(root):
            here = Path(place)
            for name in names:
                if is_temporary(name) or name.startswith(".lastgood-probe"):
                    yield f"left behind: {here / name}"
            if here == root / trial.run and "fetched" in folders:
                yield f"left behind: {here / 'fetched'}"
            if parse_step_name(here.name) is not None:
                for name in folders:
                    if not (here / name / COMPLETED).exists():
                        yield f"left behind: {here / name}, an attempt that was not committed"


__all__ = ["judge", "verify"]
