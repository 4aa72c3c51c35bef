"""A driver dies in mid-call and the next one brings other members: nothing of the old call is done to them."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import lastgood
from lastgood.client.leading import resume_terms
from lastgood.client.link import CoordinatorLink
from tests.cluster.world import LIMIT_S, World, rank_state, until


def test_an_end_step_that_waits_for_lost_members_is_never_made_of_those_that_took_their_place(world: World) -> None:
    """Seen by the kill campaign: the new ranks were saved as they were made, as the step that the old ones ended."""
    world.start()
    world.run.resume()
    world.step(1)
    world.durable(1)
    before = world.run._progress  # what the driver that dies here says in its last call
    node = json.loads((world.root / "node-1" / world.name / "node.json").read_text())["node"]
    stager = world.stager_pids()[node]
    os.kill(stager, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            call = CoordinatorLink(world.name).call
            last_words = pool.submit(call, "end_step", 2, {}, before, False, timeout_s=LIMIT_S)
            until(lambda: world.run.status()["nodes_silent"], "the coordinator misses a stager")
            assert not last_words.done()  # it waits for members to come back
            world.new_ranks(world_size=1, seed=3)  # on the other node
            world.run.add_members("actor", world.ranks, state=rank_state)
            with pytest.raises(lastgood.errors.MembershipError, match="replaced by a later add_members call"):
                last_words.result(LIMIT_S)
    finally:
        os.kill(stager, signal.SIGCONT)
    assert {c.step for c in world.run.checkpoints()} == {1}


@pytest.mark.parametrize("call", ["end_step", "resume", "finish", "end"])
def test_what_a_driver_said_before_it_died_is_heard_late_and_refused(world: World, call: str) -> None:
    world.start()
    world.run.resume()
    world.step(1)
    world.durable(1)
    run = world.run
    before = run._progress
    world.new_ranks(seed=3)
    world.join()
    digests = world.digests()
    with pytest.raises(lastgood.errors.MembershipError, match="replaced by a later add_members call"):
        if call == "end_step":
            run._link.call("end_step", 2, {}, before, False, timeout_s=LIMIT_S)
        elif call == "finish":
            run._link.call("finish", LIMIT_S, "1", before, timeout_s=LIMIT_S)
        elif call == "end":
            run._link.call("end", before.memberships, timeout_s=LIMIT_S)
        else:
            terms = replace(resume_terms(run.options, (), None), memberships=before.memberships)
            run._link.call("resume", "auto", terms, timeout_s=LIMIT_S)
    assert world.digests() == digests  # as they were made
    assert {c.step for c in run.checkpoints()} == {1}
    assert run.resume().step == 1
