"""A run is saved in two phases, ended, and continued as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import lastgood
from lastgood.coordinator.actor import SHARE_BYTES
from lastgood.storage.manifest import Manifest
from lastgood.storage.verify import verify_attempt
from lastgood.workers.install import leave
from lastgood.workers.stager_actor import find_stagers
from tests.cluster.world import World, gone, rank_state, until


def uninterrupted(world: World, steps: int) -> tuple[list[list[float]], list[str]]:
    """Losses and final digests of the same job without lastgood."""
    world.new_ranks()
    losses = [world.update() for _ in range(steps)]
    digests = world.digests()
    world.cursor["seen"] = 0
    return losses, digests


def test_fresh_actors_continue_bit_for_bit_from_the_newest_commit(world: World) -> None:
    losses, digests = uninterrupted(world, 6)

    world.start(save_freq=2)
    assert world.run.resume("auto") is None
    assert world.run.next_step == 1
    for step in range(1, 5):
        world.update()
        outcome = world.run.end_step(step, metrics={"loss": 1.0})
        assert (outcome.saved is not None) == (step % 2 == 0), outcome
    world.committed(4)
    world.update()  # step 5 is lost with its actors
    world.new_ranks(seed=99)
    world.cursor["seen"] = -1
    world.join()
    restored = world.run.resume("auto")
    assert restored is not None
    assert restored.step == 4
    assert restored.rejected == ()
    assert world.run.next_step == 5
    assert world.cursor == {"seen": 32}
    assert [world.update() for _ in (5, 6)] == losses[4:]
    assert world.digests() == digests


def test_a_save_at_step_zero_and_at_every_step_changes_nothing(world: World) -> None:
    losses, digests = uninterrupted(world, 4)
    world.start(save_freq=1)
    world.run.resume("auto")
    world.run.save(tag="start").wait("committed")
    assert world.checkpoint(0).tag == "start"
    seen = []
    for step in range(1, 5):
        seen.append(world.update())
        assert world.run.end_step(step).saved is not None
    assert seen == losses
    assert world.digests() == digests


def test_a_manifest_too_long_for_a_plain_argument_reaches_every_node_whole(world: World) -> None:
    """It goes through Ray's object store, once; here a fact about the run makes it as long as a large run's."""
    words = [f"word {n}" for n in range(20_000)]
    world.start(save_freq=1, fingerprint={"vocabulary": words})
    world.run.resume("auto")
    world.step(1)
    world.step(2)
    checkpoint = world.durable(2)
    places = [root / world.name / "global_step_2" / checkpoint.attempt for root in (*world.node_dirs(), world.store)]
    manifests = {(place / "manifest.json").read_bytes() for place in places}
    assert len(places) == 3 and len(manifests) == 1
    (data,) = manifests
    assert len(data) > 2 * SHARE_BYTES
    assert Manifest.from_bytes(data, where="manifest").fingerprint["vocabulary"] == words
    world.new_ranks()
    world.join()
    restored = world.run.resume("auto")
    assert restored is not None and restored.step == 2


def test_what_lies_at_rest_is_whole_on_every_node_and_in_the_store(world: World) -> None:
    world.start()
    world.run.resume()
    world.step(1)
    checkpoint = world.durable(1)
    places = [root / world.name / "global_step_1" / checkpoint.attempt for root in (*world.node_dirs(), world.store)]
    assert len(places) == 3
    manifests = {(place / "manifest.json").read_bytes() for place in places}
    assert len(manifests) == 1
    manifest = Manifest.from_bytes(manifests.pop(), where="manifest")
    assert {(m.role, m.rank) for m in manifest.members} == {("actor", 0), ("actor", 1), ("trainer", 0)}
    assert {m.updates for m in manifest.members if m.role == "actor"} == {1}
    assert len(manifest.participants) == 2
    assert not [f for f in verify_attempt(places[2], manifest) if f.fatal]
    assert (world.store / world.name / "latest.json").exists()
    assert list((world.store / world.name / "ledger").iterdir())


def test_close_commits_the_last_step_makes_it_durable_and_leaves_no_process(world: World) -> None:
    world.start(save_freq=100)
    world.run.resume()
    world.step(1)
    assert world.checkpoint(1) is None
    pids = world.stager_pids().values()
    world.run.close()
    markers = list((world.store / world.name / "global_step_1").glob("*/COMPLETED"))
    assert len(markers) == 1
    for pid in pids:
        until(lambda pid=pid: gone(pid), f"stager {pid} gone")
    folders = list(shared_memory(world.name))
    assert folders == []


def test_when_the_driver_and_its_actors_are_gone_everything_is_made_durable_and_lastgood_ends(world: World) -> None:
    world.start(save_freq=1, linger_s=1.0)
    world.run.resume()
    world.step(1)
    pids = [*world.stager_pids().values(), world.hello()["pid"]]
    leave(world.name)  # as if this process had died
    world.end_ranks()
    for pid in pids:
        until(lambda pid=pid: gone(pid), f"process {pid} gone")
    assert list(shared_memory(world.name)) == []
    assert len(list((world.store / world.name / "global_step_1").glob("*/COMPLETED"))) == 1


def test_another_world_size_gets_the_same_tensors_when_it_is_allowed(world: World) -> None:
    world.start()
    world.run.resume()
    for step in (1, 2):
        world.step(step)
    world.committed(2)
    world.new_ranks(world_size=1, seed=5)
    world.join()
    try:
        world.run.resume()
    except lastgood.errors.FingerprintError as error:
        assert "actor.world_size" in str(error)
        assert "2" in str(error)
        assert "1" in str(error)
    else:
        raise AssertionError("a changed world size must be refused unless it is allowed")
    restored = world.run.resume(allow_changes=["actor.world_size"], on_reshard={"rng": "rank0"})
    assert restored.step == 2
    world.step(3)
    assert world.committed(3).step == 3


def test_ranks_that_come_back_on_other_nodes_get_their_shards_from_the_node_that_has_them(world: World) -> None:
    world.start(save_freq=1)
    world.run.resume()
    world.step(1)
    before = world.digests()
    manifest = manifest_of(world, 1)
    world.new_ranks(seed=3, first_node=1)
    world.join()
    stagers = {node: handle for handle in find_stagers(world.name) for node, _ in [ray.get(handle.identity.remote())]}
    ray.get([stager.__ray_call__.remote(watch_reads) for stager in stagers.values()])
    assert world.run.resume().step == 1
    assert world.digests() == before

    traffic = {node: ray.get(stager.__ray_call__.remote(traffic_of)) for node, stager in stagers.items()}
    for node, (asked, served, from_store) in traffic.items():
        (other,) = traffic.keys() - {node}
        gone_from_here = {shard.path: shard.nbytes for shard in manifest.shards_of(node) if shard.role == "actor"}
        came_here = [(other, shard.path) for shard in manifest.shards_of(other) if shard.role == "actor"]
        assert sorted(asked) == sorted(came_here)  # each once, and nothing that another node's ranks need
        assert not from_store
        assert {path for path, *_ in served} == set(gone_from_here)
        for path, nbytes in gone_from_here.items():
            pieces = [(begin, got) for read, begin, got in served if read == path]
            assert max(got for _, got in pieces) <= PIECE_BYTES
            ends = [begin + got for begin, got in pieces]
            # One after the other, each byte once, up to the empty piece at the end: nobody else was given any.
            assert [begin for begin, _ in pieces] == [0, *ends[:-1]] and ends[-2:] == [nbytes, nbytes], (path, pieces)
        assert len(served) > 2 * len(gone_from_here)  # most shards are longer than a piece


PIECE_BYTES = 1500


def watch_reads(stager: Any) -> None:
    """Runs in a stager: pieces are small from now on, and what is asked of other nodes and served to them is noted."""
    from lastgood.workers import finder

    finder.READ_BYTES = PIECE_BYTES
    here = stager._finder
    read, peer_read, from_store = here.read, here._peer_read, here._fetch_from_store
    stager.traffic = asked, served, stored = [], [], []

    async def read_and_note(head: Any, path: str, begin: int, nbytes: int) -> bytes:
        piece = await read(head, path, begin, nbytes)
        served.append((path, begin, len(piece)))
        return piece

    def note_and_ask(node: str, head: Any, path: str) -> Any:
        asked.append((node, path))
        return peer_read(node, head, path)

    async def note_and_fetch(head: Any, record: Any, place: Path) -> None:
        stored.append(record.path)
        await from_store(head, record, place)

    here.read, here._peer_read, here._fetch_from_store = read_and_note, note_and_ask, note_and_fetch


def traffic_of(stager: Any) -> Any:
    """What watch_reads noted: (node, path) asked for; (path, begin, bytes) served; paths fetched from the store."""
    return stager.traffic


def test_resume_takes_a_step_the_newest_or_nothing_as_it_is_told(world: World) -> None:
    world.start()
    for mode in ("latest", 1):
        with pytest.raises(lastgood.errors.ResumeError, match="no checkpoint to resume from"):
            world.run.resume(mode)
    assert world.run.resume("auto") is None
    digests = {0: world.digests()}
    for step in (1, 2, 3):
        world.step(step)
        world.committed(step)
        digests[step] = world.digests()
    assert world.run.resume(2).step == 2
    assert world.run.next_step == 3
    assert world.digests() == digests[2]
    assert world.run.resume("latest").step == 3
    assert world.digests() == digests[3]
    with pytest.raises(lastgood.errors.ResumeError, match="asked for step 7"):
        world.run.resume(7)
    assert world.run.resume("none") is None
    assert world.run.next_step == 1
    assert world.digests() == digests[3]  # from scratch means: nothing is restored, the actors are as they were made


def test_save_total_limit_keeps_the_newest_and_deletes_the_rest_everywhere(world: World) -> None:
    world.start(save_total_limit=2)
    world.run.resume()
    for step in range(1, 6):
        world.step(step)
        world.durable(step)
    until(lambda: not world.shards(3), "step 3 collected on both nodes and in the store")
    assert world.shards(4)
    assert world.shards(5)
    assert [c.step for c in world.run.checkpoints() if c.committed] == [5, 4]


def shared_memory(name: str) -> Iterator[Path]:
    return Path("/dev/shm").glob(f"lastgood.*.{name}.*")


def test_a_driver_that_returns_with_fewer_roles_is_not_held_to_those_it_dropped(world: World) -> None:
    world.start()
    world.run.resume()
    world.step(1)
    world.committed(1)
    epoch = world.hello()["epoch"]
    leave(world.name)  # the driver's process says good-bye; coordinator and actors live on
    world.attach()
    world.run.add_members("actor", world.ranks, state=rank_state)
    with pytest.raises(lastgood.errors.FingerprintError, match=r"trainer\.world_size: saved 1, now nothing"):
        world.run.resume()
    assert world.run.resume(allow_changes=["trainer.world_size"]).step == 1
    world.step(2)
    roles = {shard.role for shard in manifest_of(world, 2).shards}
    assert (roles, world.hello()["epoch"]) == ({"actor"}, epoch)
    world.kill_coordinator()  # the next one learns the roles from the stagers
    world.step(3)
    assert {shard.role for shard in manifest_of(world, 3).shards} == {"actor"}


def manifest_of(world: World, step: int) -> Manifest:
    """The manifest of a committed step, as it lies on the first node."""
    attempt = world.committed(step).attempt
    path = world.node_dirs()[0] / world.name / f"global_step_{step}" / attempt / "manifest.json"
    until(path.exists, f"the manifest of step {step}")
    return Manifest.from_bytes(path.read_bytes(), where=str(path))
