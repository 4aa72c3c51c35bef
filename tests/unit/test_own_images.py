"""Images made ahead: the first save finds its memory mapped, and nothing that may still be needed is touched."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from lastgood.coordinator.messages import LoadRequest
from lastgood.storage.errors import SnapshotError
from lastgood.workers.agent import Agent
from lastgood.workers.images import Image, ImageState
from lastgood.workers.member import Member
from tests.unit.stager_world import ACTOR, LocalLink, Node, commit, head, snapshot, stage, training, update


def made(agent: Agent) -> list[str]:
    """The images of an agent, once nothing is being made ahead."""
    making = agent._images._making
    assert making is not None
    making.join(30)
    return sorted(agent._images._paths.values())


def here(node: Node) -> list[Image]:
    return [image for _, image in node.stager._staging._slots.images()]


def test_a_step_that_is_not_saved_makes_the_images_that_the_first_save_fills(node: Node, agent: Agent) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    update(state)
    node.call("mark", 1, 1, 30.0)
    ahead = made(agent)
    assert ahead == sorted(str(image.path) for image in here(node)) and len(ahead) == 3
    assert {image.state for image in here(node)} == {ImageState.FREE}
    bound = dict(agent._images._bound)
    update(state)
    node.call("mark", 1, 2, 30.0)
    snapshot(node, head(step=2))
    assert sorted(str(image.path) for image in here(node)) == ahead
    assert agent._images._bound == bound  # as they were bound ahead


def test_a_resume_ends_with_images_for_the_next_save(node: Node, agent: Agent) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    update(state)
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    manifest = commit(node, head())
    agent.close()
    fresh = Agent("run", LocalLink(node))
    fresh.add(Member.of("actor", 0, 1, training()), "m2")  # its optimizer has no state yet
    for order in ("load", "apply"):
        node.call(order, 1, head(), *([LoadRequest(manifest)] if order == "load" else []), 30.0, [ACTOR])
    assert fresh._images._making is None  # what the resume reads from is still there
    node.call("forget", 1)
    ahead = made(fresh)
    node.call("mark", 1, 2, 30.0)
    snapshot(node, head("A2", 2, 1, 2))
    assert sorted(fresh._images._paths.values()) == ahead == sorted(str(image.path) for image in here(node))
    fresh.close()


def test_what_cannot_be_made_ahead_fails_no_step_and_is_told_by_the_save(
    node: Node, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    room, create = node.stager._room, node.stager._room.create

    def full(payload_bytes: int) -> Image:
        raise SnapshotError("shared memory is too small")

    room.create = full  # type: ignore[method-assign]
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    made(agent)
    assert "could not be made ahead" in caplog.text and "shared memory is too small" in caplog.text
    with pytest.raises(SnapshotError, match="shared memory is too small"):
        snapshot(node, head())
    room.create = create  # type: ignore[method-assign]
    node.call("mark", 1, 2, 30.0)
    assert snapshot(node, head("A2", 2, 1, 2)).members[0].step == 2


def test_a_state_that_cannot_be_saved_is_told_at_the_first_step(
    node: Node, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.add(Member.of("actor", 0, 1, {"cursor": {"when": object()}}), "m1")
    node.call("mark", 1, 1, 30.0)
    assert "the next save is going to fail: actor:0.cursor: " in caplog.text


def test_images_of_a_save_that_is_not_over_stay_as_they_are(node: Node, agent: Agent) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    made(agent)
    snapshot(node, head())
    stage(node, head())
    agent.add(Member.of("extra", 0, 1, {"cursor": {"seen": 1}}), "m1")  # registers this process anew
    node.call("mark", 1, 2, 30.0)
    made(agent)
    states = [(image.state, image.attempt) for image in here(node)]
    assert states.count((ImageState.STAGED, "A1")) == 3
    assert states.count((ImageState.FREE, "")) == 1  # the new member's


def test_a_process_that_leaves_while_its_images_are_made_leaves_none_behind(node: Node, agent: Agent) -> None:
    staging: Any = node.stager._staging
    create, begun, go_on = staging._slots._create, threading.Event(), threading.Event()

    async def slow(request: Any) -> Image:
        begun.set()
        await asyncio.to_thread(go_on.wait, 30)
        return await create(request)

    staging._slots._create = slow
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    assert begun.wait(30)
    agent.close()
    go_on.set()
    made(agent)
    assert here(node) == [] and node.stager._room.nbytes() == 0
