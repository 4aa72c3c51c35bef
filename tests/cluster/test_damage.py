"""Rot is found before any live state is touched; the previous good checkpoint is used, loudly."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lastgood
from tests.cluster.world import World, flip


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def swap(path: Path) -> None:
    other = next(p for p in path.parent.iterdir() if p != path and p.suffix == path.suffix)
    spare = path.with_suffix(".spare")
    path.rename(spare)
    other.rename(path)
    spare.rename(other)


DAMAGE = {"flip": flip, "truncate": truncate, "missing": Path.unlink, "swap": swap}


def two_commits(world: World, *, spoilt: bool = True) -> tuple[list[str], list[str]]:
    """Steps 1 and 2 durable; the digests of both. The images of step 2 that lie in memory are damaged, or are not."""
    world.start()
    world.run.resume()
    world.step(1)
    first = world.digests()
    world.durable(1)
    world.step(2)
    world.durable(2)
    if spoilt:
        world.spoil_images()
    return first, world.digests()


@contextlib.contextmanager
def damaged(paths: list[Path], damage: Callable[[Path], None]) -> Iterator[None]:
    """Damages files, and puts back what was there."""
    folders = {path.parent for path in paths}
    before = {path: path.read_bytes() for folder in folders for path in folder.iterdir()}
    for path in paths:
        damage(path)
    yield
    for path, data in before.items():
        path.write_bytes(data)


def test_a_damaged_shard_falls_back_loudly_and_one_bad_tier_is_healed_from_the_other(world: World) -> None:
    first, second = two_commits(world)
    hurt = [p for p in world.shards(2) if p.name == "rank_00000.model.safetensors" and p.parent.name == "actor"]
    assert len(hurt) == 2, hurt  # one local, one in the store
    for name, damage in DAMAGE.items():
        world.update()  # live state differs from both checkpoints
        with damaged(hurt, damage):
            restored = world.run.resume()
            assert (name, restored.step, len(restored.rejected)) == (name, 1, 1)
            assert "step 2" in restored.rejected[0]
            assert "rank_00000.model" in restored.rejected[0]
            assert world.digests() == first, name
        for place in hurt:
            world.update()
            with damaged([place], damage):
                restored = world.run.resume()
                assert (name, restored.step, restored.rejected) == (name, 2, ())
                assert world.digests() == second, (name, place)
    world.step(3)
    assert world.committed(3).step == 3


def test_what_lies_in_memory_is_read_first_and_heals_a_damaged_disk_and_store(world: World) -> None:
    _, second = two_commits(world, spoilt=False)
    world.update()
    with damaged(world.shards(2), flip):
        restored = world.run.resume()
        assert (restored.step, restored.rejected) == (2, ())
        assert world.digests() == second


def test_any_component_of_any_member_is_checked(world: World) -> None:
    first, _ = two_commits(world)
    names = sorted({(p.parent.name, p.name) for p in world.shards(2)})
    assert len(names) == 9  # 2 ranks x (model, optimizer, scheduler, rng), and the driver's cursor
    for role, name in names:
        hurt = [p for p in world.shards(2) if (p.parent.name, p.name) == (role, name)]
        with damaged(hurt, flip):
            restored = world.run.resume()
            assert (name, restored.step, len(restored.rejected)) == (name, 1, 1)
            assert name in restored.rejected[0]
    assert world.digests() == first


def test_nothing_whole_is_an_error_and_touches_nothing(world: World) -> None:
    two_commits(world)
    world.update()
    before = world.digests()
    with (
        damaged(world.shards(1) + world.shards(2), flip),
        pytest.raises(lastgood.errors.ResumeError, match="no checkpoint of run"),
    ):
        world.run.resume()
    assert world.digests() == before


def test_garbage_in_pointers_is_scanned_around(world: World) -> None:
    _, second = two_commits(world)
    for root in (*world.node_dirs(), world.store):
        (root / world.name / "latest.json").write_bytes(b"")
        (root / world.name / "global_step_2" / "COMPLETED").write_bytes(b"\x00garbage")
    world.run.close()
    world.update()
    world.attach()
    world.join()
    assert world.run.resume().step == 2
    assert world.digests() == second


def test_all_local_disks_lost_resumes_from_the_store(world: World) -> None:
    _, second = two_commits(world)
    world.run.close()
    for folder in world.node_dirs():
        shutil.rmtree(folder)
    world.update()
    world.attach()
    world.join()
    assert world.run.resume().step == 2
    assert world.digests() == second
