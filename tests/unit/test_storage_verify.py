"""Any flipped, missing, truncated, swapped or extra byte or file is found; only COMPLETED plus manifest count."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lastgood.storage.digest import BlockDigests
from lastgood.storage.errors import IntegrityError, NotACheckpointError
from lastgood.storage.manifest import Completed, Manifest, Tombstone
from lastgood.storage.verify import (
    FindingKind,
    RejectKind,
    find_committed,
    open_checkpoint,
    read_attempt,
    read_verified,
    verify_attempt,
)
from tests.unit.storage_samples import CREATED, sealed, write_attempt

Attempt = tuple[Path, Manifest]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return write_attempt(tmp_path)


def kinds(attempt: Attempt) -> dict[str, FindingKind]:
    return {finding.path: finding.kind for finding in verify_attempt(*attempt)}


def test_a_whole_attempt_has_no_findings(attempt: Attempt) -> None:
    assert verify_attempt(*attempt) == []


@given(shard=st.integers(0, 3), at=st.integers(0, 3399), flip=st.integers(1, 255))
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_single_flipped_byte_is_found_with_its_block(attempt: Attempt, shard: int, at: int, flip: int) -> None:
    folder, manifest = attempt
    place = folder / manifest.shards[shard].path
    good = place.read_bytes()
    bad = bytearray(good)
    bad[at] ^= flip
    place.write_bytes(bad)
    (finding,) = verify_attempt(folder, manifest)
    place.write_bytes(good)
    assert finding.kind is FindingKind.FLIPPED and finding.fatal and finding.path == manifest.shards[shard].path
    assert f"block {at // 1000} " in finding.detail


def test_missing_truncated_and_longer_shards_are_found(attempt: Attempt) -> None:
    folder, manifest = attempt
    first, second, third, fourth = (folder / shard.path for shard in manifest.shards)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(third.read_bytes() + b"\0")
    fourth.write_bytes(b"")
    expected = [FindingKind.MISSING, FindingKind.LENGTH, FindingKind.LENGTH, FindingKind.LENGTH]
    assert kinds(attempt) == dict(zip((shard.path for shard in manifest.shards), expected, strict=True))


def test_two_exchanged_shards_are_both_named(attempt: Attempt) -> None:
    folder, manifest = attempt
    one, other = (folder / manifest.shards[index].path for index in (0, 3))
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    found = {finding.path: finding for finding in verify_attempt(*attempt)}
    assert {finding.kind for finding in found.values()} == {FindingKind.SWAPPED} and len(found) == 2
    assert manifest.shards[3].path in found[manifest.shards[0].path].detail


def test_exchanged_shards_of_other_lengths_and_block_sizes_are_named_too(tmp_path: Path) -> None:
    folder, manifest = write_attempt(tmp_path, {"0.a": b"x" * 10, "0.b": b"y" * 2500})
    a, b = (folder / shard.path for shard in manifest.shards)
    left, right = a.read_bytes(), b.read_bytes()
    a.write_bytes(right)
    b.write_bytes(left)
    assert set(kinds((folder, manifest)).values()) == {FindingKind.SWAPPED}


def test_strangers_are_reported_and_do_not_spoil_the_checkpoint(attempt: Attempt) -> None:
    folder, manifest = attempt
    (folder / "actor" / "rank_00007.model.safetensors").write_bytes(b"of another try")
    (folder / "notes.txt").write_bytes(b"")
    (folder / "elsewhere").symlink_to("/")
    found = verify_attempt(folder, manifest)
    assert {finding.kind for finding in found} == {FindingKind.STRANGER} and len(found) == 3
    assert not any(finding.fatal for finding in found)


def test_links_and_pipes_in_place_of_shards_are_refused_unread(attempt: Attempt, tmp_path: Path) -> None:
    folder, manifest = attempt
    first, second, third, fourth = (folder / shard.path for shard in manifest.shards)
    outside = tmp_path / "outside"
    shutil.copy(first, outside)
    first.unlink()
    first.symlink_to(outside)
    second.rename(folder / "inside")
    second.symlink_to(folder / "inside")
    third.unlink()
    os.mkfifo(third)
    fourth.unlink()
    fourth.mkdir()
    found = kinds(attempt)
    assert all(found[shard.path] is FindingKind.NOT_A_FILE for shard in manifest.shards)


def test_a_role_directory_that_is_a_link_is_refused(attempt: Attempt) -> None:
    folder, manifest = attempt
    (folder / "actor").rename(folder / "real")
    (folder / "actor").symlink_to("real")
    assert {kinds(attempt)[shard.path] for shard in manifest.shards} == {FindingKind.NOT_A_FILE}


def test_a_node_is_asked_only_for_its_own_shards(attempt: Attempt) -> None:
    folder, manifest = attempt
    (folder / manifest.shards[0].path).unlink()
    assert verify_attempt(folder, manifest, manifest.shards[1:]) == []


def test_read_verified_gives_the_bytes_or_an_error_before_they_are_used(attempt: Attempt) -> None:
    folder, manifest = attempt
    shard = manifest.shards[0]
    place, digests = folder / shard.path, BlockDigests.of_record(shard)
    target = bytearray(shard.nbytes)
    assert bytes(read_verified(place, digests, memoryview(target))) == place.read_bytes() == bytes(target)
    place.write_bytes(b"!" + place.read_bytes()[1:])
    with pytest.raises(IntegrityError, match="block 0"):
        read_verified(place, digests)
    place.write_bytes(b"!")
    with pytest.raises(IntegrityError, match="1 bytes instead of"):
        read_verified(place, digests)
    place.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        read_verified(place, digests)


def test_checkpoints_are_found_newest_first_by_epoch_and_sequence_not_by_step(tmp_path: Path) -> None:
    for name, step, epoch, sequence in [("a", 900, 1, 9), ("b", 100, 2, 1), ("c", 400, 2, 11), ("d", 400, 2, 2)]:
        write_attempt(tmp_path, attempt=name, step=step, epoch=epoch, sequence=sequence)
    found = find_committed(tmp_path / "qwen")
    assert [one.completed.attempt for one in found.committed] == ["c", "d", "b", "a"]
    assert found.rejected == ()


def _reject(folder: Path) -> tuple[RejectKind, str]:
    found = find_committed(folder.parent.parent)
    assert found.committed == ()
    (one,) = found.rejected
    assert one.path == folder
    return one.kind, one.reason


def test_an_attempt_without_completed_does_not_count(attempt: Attempt) -> None:
    folder, _ = attempt
    (folder / "COMPLETED").unlink()
    assert _reject(folder)[0] is RejectKind.UNCOMMITTED


@pytest.mark.parametrize("name", ["COMPLETED", "manifest.json"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"{}", None])
def test_garbage_in_completed_or_manifest_does_not_count(attempt: Attempt, name: str, content: bytes | None) -> None:
    folder, _ = attempt
    if content is None:
        content = (folder / name).read_bytes()[:-20]
    (folder / name).write_bytes(content)
    kind, reason = _reject(folder)
    assert kind is RejectKind.BROKEN and name in reason


def test_a_manifest_that_is_missing_or_has_another_digest_does_not_count(attempt: Attempt) -> None:
    folder, manifest = attempt
    (folder / "manifest.json").write_bytes(manifest.to_bytes() + b" ")
    assert "digest is not the one in COMPLETED" in _reject(folder)[1]
    (folder / "manifest.json").unlink()
    assert "missing" in _reject(folder)[1]


def test_any_flipped_byte_in_the_manifest_or_completed_is_found(attempt: Attempt) -> None:
    folder, _ = attempt
    for name in ("manifest.json", "COMPLETED"):
        good = (folder / name).read_bytes()
        for at in range(0, len(good), 7):
            (folder / name).write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            found = find_committed(folder.parent.parent)
            assert not found.committed
            assert found.rejected
        (folder / name).write_bytes(good)


def test_completed_of_another_attempt_step_or_run_does_not_count(attempt: Attempt) -> None:
    folder, _ = attempt
    for other in (folder.with_name("attempt-2"), folder.parent.with_name("global_step_500") / folder.name):
        other.parent.mkdir(exist_ok=True)
        shutil.copytree(folder, other)
    shutil.copytree(folder.parent.parent, folder.parent.parent.with_name("other-run"))
    found = find_committed(folder.parent.parent)
    assert [one.path for one in found.committed] == [folder]
    assert len(found.rejected) == 2 and all("stands elsewhere" in one.reason for one in found.rejected)
    assert find_committed(folder.parent.parent.with_name("other-run")).committed == ()


def test_completed_that_contradicts_its_manifest_does_not_count(attempt: Attempt) -> None:
    folder, manifest = attempt
    completed = Completed.of(manifest, manifest.to_bytes(), CREATED).model_copy(update={"sequence": 99})
    (folder / "COMPLETED").write_bytes(completed.to_bytes())
    assert "another story" in _reject(folder)[1]


def test_a_tombstone_says_that_the_attempt_was_collected(attempt: Attempt) -> None:
    folder, manifest = attempt
    tombstone = Tombstone(run="qwen", reason="retention", deleted_at=CREATED, **manifest.head.model_dump())
    (folder / "COMPLETED").write_bytes(tombstone.to_bytes())
    assert _reject(folder)[0] is RejectKind.COLLECTED


def test_another_format_version_is_told_with_both_versions(attempt: Attempt) -> None:
    folder, _ = attempt
    data = (folder / "COMPLETED").read_bytes()
    (folder / "COMPLETED").write_bytes(sealed({**json.loads(data), "format_version": 9}))
    kind, reason = _reject(folder)
    assert kind is RejectKind.VERSION and "version 9" in reason and "reads version 1 and 2" in reason
    (folder / "COMPLETED").write_bytes(data.replace(b'"format_version":2', b'"format_version":3'))
    assert _reject(folder)[0] is RejectKind.BROKEN  # one bit: nobody wrote a version 3


def test_strange_directories_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    folder, _ = write_attempt(tmp_path)
    run = folder.parent.parent
    (run / "global_step_999").mkdir()
    (run / "global_step_1000").symlink_to(folder.parent)
    (run / "global_step_abc").mkdir()
    (run / "records").mkdir()
    (folder.parent / "link").symlink_to(folder)
    found = find_committed(run)
    assert [one.path for one in found.committed] == [folder]
    assert {one.path.name for one in found.rejected} == {"global_step_1000", "link"}


def test_a_path_means_an_attempt_a_step_or_a_run(tmp_path: Path) -> None:
    old, _ = write_attempt(tmp_path, attempt="old", sequence=1)
    new, _ = write_attempt(tmp_path, attempt="new", sequence=2)
    far, _ = write_attempt(tmp_path, attempt="far", sequence=3, step=500)
    step = old.parent
    assert open_checkpoint(old).path == old
    assert open_checkpoint(step).path == new  # no pointer: the newest of the step
    (step / "COMPLETED").write_bytes((old / "COMPLETED").read_bytes())
    assert open_checkpoint(step).path == old
    (step / "COMPLETED").write_bytes(b"")
    assert open_checkpoint(step).path == new
    assert open_checkpoint(tmp_path / "qwen").path == far


def test_a_step_whose_pointer_names_a_collected_attempt_is_the_newest_of_the_others(tmp_path: Path) -> None:
    old, _ = write_attempt(tmp_path, attempt="old", sequence=1)
    new, _ = write_attempt(tmp_path, attempt="new", sequence=2)
    (old.parent / "COMPLETED").write_bytes((new / "COMPLETED").read_bytes())
    tombstone = Tombstone(
        run="qwen", attempt="new", step=400, epoch=3, sequence=2, reason="retention", deleted_at="2031-05-06T07:08:09Z"
    )
    (new / "COMPLETED").write_bytes(tombstone.to_bytes())
    assert open_checkpoint(old.parent).path == old


def test_a_step_whose_pointer_names_a_broken_attempt_is_an_error_not_another_attempt(tmp_path: Path) -> None:
    old, _ = write_attempt(tmp_path, attempt="old", sequence=1)
    new, _ = write_attempt(tmp_path, attempt="new", sequence=2)
    (old.parent / "COMPLETED").write_bytes((new / "COMPLETED").read_bytes())
    (new / "manifest.json").unlink()
    with pytest.raises(IntegrityError):
        open_checkpoint(old.parent)


def test_a_path_that_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "qwen" / "global_step_3" / "x").mkdir(parents=True)
    for path in (tmp_path / "nothing", tmp_path / "qwen", tmp_path / "qwen" / "global_step_3"):
        with pytest.raises(NotACheckpointError, match="no checkpoint"):
            open_checkpoint(path)
    with pytest.raises(NotACheckpointError):
        read_attempt(tmp_path / "qwen" / "global_step_3" / "x")


def test_what_is_damaged_is_passed_over_with_its_name_if_it_is_or_may_be_newer(tmp_path: Path) -> None:
    older, _ = write_attempt(tmp_path, attempt="older", sequence=1)
    whole, _ = write_attempt(tmp_path, attempt="whole", sequence=2)
    newer, _ = write_attempt(tmp_path, attempt="newer", sequence=3)
    under_way, _ = write_attempt(tmp_path, attempt="under-way", sequence=4)
    (under_way / "COMPLETED").unlink()
    for folder in (older, newer):
        (folder / "manifest.json").write_bytes(b"{}")
    (newer.parent / "notes.txt").touch()
    (newer.parent / "link").symlink_to(newer)
    step, run = whole.parent, whole.parent.parent
    for path in (step, run):
        assert [one.path for one in open_checkpoint(path).passed_over] == [newer]
    (step / "COMPLETED").write_bytes((whole / "COMPLETED").read_bytes())  # the pointer came no further
    assert [one.path for one in open_checkpoint(step).passed_over] == [newer]
    (older / "COMPLETED").write_bytes(b"")  # nobody knows any more what stood there
    assert {one.path for one in open_checkpoint(run).passed_over} == {older, newer}
    assert open_checkpoint(whole).passed_over == ()
