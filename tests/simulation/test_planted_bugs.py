"""The net catches fish: each planted bug is found by the referee within a few hundred schedules."""

from __future__ import annotations

import pytest

from lastgood.coordinator.moves import Phase
from tests.simulation.planted import PLANTS
from tests.simulation.referee import BrokenPromise
from tests.simulation.schedules import quiet, run_seed
from tests.simulation.world import World

SEEDS = range(400)

# What the referee says of each (part of the sentence).
SAYS = {
    "overwritten_record": "became",
    "one_vote": "but the records are",
    "deleted_unheard": "are deleted on",
    "reused_ids": "was used for",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found_by_the_promises_alone(plant: str) -> None:
    found: list[str] = []
    for seed in SEEDS:
        try:
            run_seed(seed, plant=plant, invariants=False)
        except BrokenPromise as broken:
            found.append(str(broken))
        except Exception as other:  # noqa: BLE001 - the core notices some of them itself, which is as good
            found.append(f"{type(other).__name__}")
        if any(SAYS[plant] in sentence for sentence in found):
            break
    assert any(SAYS[plant] in sentence for sentence in found), found


def test_without_a_plant_the_same_seeds_are_clean() -> None:
    for seed in SEEDS:
        run_seed(seed, invariants=False)


def lose_a_disk_after_publishing(plant: str | None) -> None:
    """n1 has COMPLETED, n2 has accepted and loses its disk before it is uploaded; a new coordinator looks at it."""
    world = World(2, plant=plant, invariants=False)
    first = world.start_coordinator()
    quiet(world, first)
    world.store.up = False
    world.open_window(first, due=True)
    while not world.nodes["n1"].completed:
        world.deliver(0)
    first.alive = False
    world.flight.clear()
    world.nodes["n2"].crash()
    world.nodes["n2"].wipe()
    world.nodes["n2"].restart()
    world.register("n2")
    second = world.start_coordinator()
    for _ in range(40):
        if world.flight:
            world.deliver(0)
    assert "a1.1" in world.nodes["n1"].completed and "a1.1" in world.nodes["n1"].staged
    assert second.core.attempts["a1.1"].phase is Phase.COMMITTED


def test_completed_taken_for_one_node_s_vote_is_found_when_another_node_s_disk_is_lost() -> None:
    lose_a_disk_after_publishing(None)
    with pytest.raises(BrokenPromise, match="became refuse"):
        lose_a_disk_after_publishing("completed_is_a_vote")
