"""What starting again makes of the disks: the real stagers sweep, a real coordinator recovers by the protocol's table.

After it nothing may be left that nobody owns, every attempt is a whole checkpoint everywhere or nothing anywhere, and
pointers lead to the newest.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from lastgood.coordinator.driver import Driver
from lastgood.coordinator.epochs import claim_epoch
from lastgood.coordinator.retention import collect_remotely
from lastgood.coordinator.settings import Settings
from lastgood.storage.manifest import Manifest, Tombstone
from tests.crash.cluster import COMMITTED_AT, NODES, PATHS, RUN, Place, Stagers
from tests.crash.disk_model import read_tree, split
from tests.crash.judge import ROOTS, STORE, Broken, Judge, Root, View, nobodys
from tests.crash.standing import lead_to_the_newest

WAIT_S = 60.0


def recover(place: Place, judge: Judge, before: dict[str, View]) -> None:
    """Starts stagers and a coordinator of a new epoch on the disks, and lets them finish what the dead ones began.

    `before`: what was visible at the crash. Raises Broken when something is lost or left undone.
    """
    usable = asyncio.run(_recover(place))
    trees = split(read_tree(place.root))
    after = judge.look(trees)
    everywhere = {attempt for view in after.values() for attempt in view.committed}
    collected = {
        attempt
        for view in before.values()
        for attempt, head in view.committed.items()
        if any(isinstance(Root(name, tree).completed(head), Tombstone) for name, tree in trees.items())
    }
    for name, view in after.items():
        missing = everywhere - view.committed.keys()
        if missing:
            raise Broken(f"{name} lacks {sorted(missing)}, which others hold as committed after the recovery")
        gone = before[name].committed.keys() - everywhere - collected
        if gone:
            raise Broken(f"{name}: {sorted(gone)} was committed, and is gone after the recovery")
    accepted = frozenset.intersection(*(before[node].accepted for node in NODES))
    if accepted - everywhere - collected:
        raise Broken(f"{sorted(accepted)} had every accept, and is no checkpoint after the recovery")
    newest = max(((h.epoch, h.sequence, a) for a, h in after[STORE].committed.items()), default=None)
    if (usable[0] if usable else None) != (newest[2] if newest else None):
        raise Broken(f"a resume is offered {usable}, and the newest whole checkpoint is {newest}")
    lead_to_the_newest(trees, after)
    for name in trees:
        nobodys(name, place.root / name / ROOTS[name], everywhere)


async def _recover(place: Place) -> list[str]:
    """Answers the attempts that a resume may take, newest first."""
    stagers = Stagers(place)
    for node in NODES:
        stagers.open(node)
    floor = max([await stager.highest_epoch() for stager in stagers.of.values()])
    epoch = claim_epoch(place.store, PATHS, "the next one", floor)
    numbers = itertools.count(1)
    driver = Driver(
        Settings(RUN, epoch, retry_s=0.01),
        store=place.store,
        new_attempt_id=lambda: f"e{epoch}-{next(numbers)}",
        clock=asyncio.get_running_loop().time,
        now_utc=lambda: COMMITTED_AT,
        blocking=_at_once,
    )
    try:
        for node in NODES:
            await driver.add_node(stagers.of[node])
        await driver.recover()
        if not await driver.settle(WAIT_S) or not (await driver.drain(WAIT_S)).drained:
            raise Broken(f"the coordinator does not come to an end: {driver.status()}")
        if not await driver._until(lambda: not driver.core.active, WAIT_S):
            raise Broken(f"an attempt is not over: {driver.status()['background']}")
        place.store.sweep("", 0.0)  # as the service and a probe do, with a day's patience
        for head in driver.half_collected():
            collect_remotely(place.store, PATHS, head, "")
        names = {stager.node: stager for stager in stagers.of.values()}
        for node, heads in driver.leftovers().items():  # as the service does at its heartbeat
            for head in heads:
                await names[node].collect(epoch, head, "collected while this node was away")
                driver.collected(head)
        driver.core.invariants()
        if driver.faults:
            raise Broken(f"the coordinator found a defect: {driver.faults}")
        usable, _ = await driver.candidates("auto")
        return [Manifest.from_bytes(candidate.manifest, where="it").attempt for candidate in usable]
    finally:
        await driver.stop()
        await stagers.close()


async def _at_once(work: Any) -> Any:
    return work()
