"""No name and no path, wherever it comes from, leads out of its root."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.storage.errors import IntegrityError, OptionsError
from lastgood.storage.ids import new_id, ulid, utc_text
from lastgood.storage.layout import (
    NAME,
    RunPaths,
    check_name,
    confine,
    parse_epoch_name,
    parse_ledger_name,
    parse_shard_path,
    parse_step_name,
    shard_path,
    step_name,
)

BAD = ["", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "a/", "./a", "a/.", "a\0b", "a\\b", "\ud800"]


@pytest.mark.parametrize("relative", BAD, ids=repr)
def test_a_path_that_could_leave_its_root_is_refused(tmp_path: Path, relative: str) -> None:
    with pytest.raises(IntegrityError):
        confine(tmp_path, relative)


@given(st.text(max_size=30))
def test_what_confine_lets_through_lies_below_the_root(relative: str) -> None:
    root = Path("/nowhere/at/all")
    try:
        place = confine(root, relative)
    except IntegrityError:
        return
    assert place.resolve().is_relative_to(root) and place.resolve() != root


def test_a_link_that_leads_outside_is_refused_and_one_inside_is_not(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    (root / "inside").symlink_to("real")
    (root / "outside").symlink_to(tmp_path)
    (root / "loop").symlink_to("loop")
    assert confine(root, "inside/file") == root / "inside/file"
    with pytest.raises(IntegrityError, match="outside of"):
        confine(root, "outside/file")
    with pytest.raises(IntegrityError):
        confine(root, "loop/file")


def test_a_root_that_is_itself_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert confine(tmp_path / "link", "a/b") == tmp_path / "link/a/b"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-x", "a/b", "a b", "a\n", "ä", "x" * 129, "a\0"])
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(OptionsError, match="Nothing was touched"):
        check_name("run", name)


def test_a_role_cannot_be_named_as_a_file_of_every_checkpoint() -> None:
    with pytest.raises(OptionsError):
        shard_path("COMPLETED", 0, "model")


def test_shard_paths_are_those_of_the_design_and_read_back() -> None:
    assert shard_path("actor", 3, "model") == "actor/rank_00003.model.safetensors"
    for role, rank, component in [("actor", 3, "model"), ("a.b", 123456, "x.safetensors"), ("r", 0, "rank_1")]:
        assert parse_shard_path(shard_path(role, rank, component)) == (role, rank, component)
    for wrong in (
        "actor/rank_3.model.safetensors",
        "actor/rank_0000003.m.safetensors",
        "x",
        "../rank_00003.m.safetensors",
    ):
        assert parse_shard_path(wrong) is None


def test_keys_are_those_of_the_design() -> None:
    paths = RunPaths("/staging", "qwen")
    assert paths.latest == "qwen/latest.json"
    assert paths.pointer(400) == "qwen/global_step_400/COMPLETED"
    assert paths.completed(400, "A1") == "qwen/global_step_400/A1/COMPLETED"
    assert paths.shard(400, "A1", "actor/rank_00003.model.safetensors").endswith(
        "A1/actor/rank_00003.model.safetensors"
    )
    assert paths.place(paths.record("A1")) == Path("/staging/qwen/records/A1.json")
    with pytest.raises(OptionsError):
        paths.record("../x")
    with pytest.raises(IntegrityError):
        paths.shard(400, "A1", "../x")


@given(st.integers(0, 10**17), st.integers(0, 10**17))
def test_numbers_in_names_read_back(first: int, second: int) -> None:
    paths = RunPaths("", "r")
    assert parse_step_name(step_name(first)) == first
    assert parse_ledger_name(paths.ledger(first, second).rpartition("/")[2]) == (first, second)
    assert parse_epoch_name(paths.epoch(first).rpartition("/")[2]) == first


def test_strange_names_are_no_steps() -> None:
    for name in (
        "global_step_",
        "global_step_01",
        "global_step_-1",
        "global_step_1x",
        "xglobal_step_1",
        "global_step_٣",
    ):
        assert parse_step_name(name) is None


def test_ids_sort_by_their_time_and_are_names() -> None:
    early, late = ulid(lambda: 1000.0), ulid(lambda: 1000.001)
    assert early < late and len(early) == 26 and NAME.fullmatch(new_id("save"))
    assert ulid(lambda: 1.0, lambda n: b"\0" * n) == "00000000Z80000000000000000"
    assert utc_text(1.5) == "1970-01-01T00:00:01.500Z"
