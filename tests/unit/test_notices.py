"""Word that a node will be taken away is heeded until a save for it stands, or the node is gone."""

from __future__ import annotations

import asyncio

from lastgood.coordinator.ports import Notice
from lastgood.storage.errors import StagingError
from tests.unit.led_world import Led, run, until
from tests.unit.test_member_led import begin

DRAINED = Notice("n1", "Ray drains node n1, 120 s are left", 120.0)
BEATS_S = 0.4  # several heartbeats of Led


def asked(w: Led) -> list[str]:
    return [request_id for request_id in w.driver._outcomes if request_id.startswith("notice-")]


def committed(w: Led) -> bool:
    return any(c.committed for c in w.service.checkpoints())


async def train(w: Led, generation: str, goes_on: bool = True) -> None:
    """A group resumes and makes some steps; a save is agreed on at one of them."""
    _, line = await begin(w, generation, mode="none")
    for step in (1, 2, 3):
        w.end(step, line)
        await asyncio.sleep(0.05)

    async def go_on() -> None:
        for step in range(4, 100):
            await asyncio.sleep(0.2)
            w.end(step, line)

    if goes_on:
        w.going = asyncio.ensure_future(go_on())


def test_a_notice_that_comes_while_members_are_missing_is_heeded_when_they_are_back() -> None:
    async def scene() -> None:
        w = Led(save_freq=None)
        await w.start()
        await train(w, "a", goes_on=False)
        for rank in (0, 1):
            w.ports[rank].die(rank)
        await w.service.nodes.refresh()
        w.notices.append(DRAINED)
        await until(lambda: len(asked(w)) == 1)
        await asyncio.sleep(BEATS_S)
        assert len(asked(w)) == 1  # nothing can be saved: nothing is asked for, heartbeat after heartbeat
        await train(w, "b")
        await until(lambda: committed(w))
        await w.service.end()

    run(scene())


def test_a_save_for_a_notice_that_fails_is_asked_for_again_and_a_committed_one_is_not() -> None:
    async def scene() -> None:
        w = Led(save_freq=None)
        await w.start()
        await train(w, "a")
        w.ports[1].fail["stage"] = StagingError("the disk does not answer")
        w.notices.append(DRAINED)
        await until(lambda: committed(w))
        await asyncio.sleep(BEATS_S)
        assert len(asked(w)) == 2
        await w.service.end()

    run(scene())


def test_a_save_that_is_under_way_is_not_asked_for_again_nor_one_for_which_no_time_is_left() -> None:
    async def scene() -> None:
        w = Led(save_freq=None)
        await w.start()
        await train(w, "a")
        w.ports[1].gates["stage"] = asyncio.Event()
        w.ports[1].fail["stage"] = StagingError("the disk does not answer")
        w.notices.append(DRAINED)
        await until(lambda: "stage" in w.ports[1].log)
        await asyncio.sleep(BEATS_S)
        assert len(asked(w)) == 1
        w.notices[0] = Notice("n1", "Ray drains node n1, 0 s are left", 0.0)
        w.ports[1].gates["stage"].set()
        await until(lambda: all(outcome.failed for outcome in w.driver._outcomes.values()))
        await asyncio.sleep(BEATS_S)
        assert len(asked(w)) == 1
        await w.service.end()

    run(scene())
