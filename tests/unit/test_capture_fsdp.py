"""Real FSDP2 over gloo, each rank a process: saving changes nothing, resuming is exact, other world sizes load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lastgood.storage.errors import IntegrityError
from lastgood.workers import load
from tests.unit.checkpoints import bits, locate_in
from tests.unit.fsdp_ranks import RESUMED, STEPS, Run, manifest_in

ROOT = Path(__file__).parents[2]


def run_ranks(job: str, folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Runs a job of fsdp_ranks on all ranks to their end; answers what each has told."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.fsdp_ranks", job, str(folder)],
            cwd=ROOT,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(said)
    return [json.loads((folder / f"{job}_{world_size}_{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[dict[str, Any]]:
    return run_ranks("train", folder, 2)


def test_saving_at_step_zero_and_after_every_step_changes_nothing(trained: list[dict[str, Any]]) -> None:
    for rank in trained:
        assert rank["saved"] == rank["undisturbed"]
        assert len(rank["saved"]["losses"]) == STEPS
        assert rank["updates"] == STEPS


def test_steps_then_resume_in_fresh_processes_equals_an_uninterrupted_run(
    trained: list[dict[str, Any]], folder: Path
) -> None:
    for resumed, uninterrupted in zip(run_ranks("resume", folder, 2), trained, strict=True):
        assert resumed["middle"] == {**uninterrupted["middle"], "losses": []}
        losses = uninterrupted["undisturbed"]["losses"][RESUMED:]
        assert resumed["end"] == {**uninterrupted["undisturbed"], "losses": losses}
        assert (resumed["updates"], resumed["end_updates"]) == (RESUMED, STEPS)


def test_fsdp1_is_refused_with_the_way_out(trained: list[dict[str, Any]]) -> None:
    for rank in trained:
        assert "FSDP1" in rank["fsdp1"]
        assert "fully_shard" in rank["fsdp1"]


def test_two_ranks_load_on_four_with_identical_full_tensors(trained: list[dict[str, Any]], folder: Path) -> None:
    ranks = run_ranks("reshard", folder, 4)
    assert all_bits(folder / "full_on_4.pt") == all_bits(folder / "full.pt")
    for rank in ranks:
        assert "saved by 2 members" in rank["refused"]
        assert "there are 4 now" in rank["refused"]
        assert rank["fresh"] == ["rng"]
        assert rank["updates"] == STEPS
        assert rank["cursor"] == STEPS
        assert rank["replicas"]
        assert rank["another mesh"]
    assert any(rank["empty_pieces"] for rank in ranks)
    run = Run(sharded=False)  # and back: equal boxes of replicas are read once
    load_whole(run, folder / "replicas", 4).apply()
    assert {name: bits(tensor) for name, tensor in run.full_tensors().items()} == all_bits(folder / "full.pt")


def test_two_ranks_load_into_one_unsharded_module_with_identical_full_tensors(
    trained: list[dict[str, Any]], folder: Path
) -> None:
    run = Run(sharded=False)
    load_whole(run, folder / f"step_{STEPS}").apply()
    found = {name: bits(tensor) for name, tensor in run.full_tensors().items()}
    assert found == all_bits(folder / "full.pt")
    assert run.scheduler.last_epoch == STEPS
    assert run.model.head.weight is run.model.embed.weight


def test_a_flipped_byte_in_any_ranks_shard_is_found_before_live_state_is_touched(
    trained: list[dict[str, Any]], folder: Path
) -> None:
    place = folder / f"step_{STEPS}" / "actor" / "rank_00001.model.safetensors"
    content = bytearray(place.read_bytes())
    content[4096 + 8] ^= 1
    place.write_bytes(content)
    run = Run(sharded=False)
    before = run.trace()
    with pytest.raises(IntegrityError, match=r"actor:1.*rank_00001\.model"):
        load_whole(run, folder / f"step_{STEPS}")
    assert run.trace() == before
    content[4096 + 8] ^= 1
    place.write_bytes(content)


def load_whole(run: Run, checkpoint: Path, saved_by: int = 2) -> load.PreparedMember:
    policy = {"rng": "fresh", "cursor": "rank0"}
    return load.prepare(run.member(), manifest_in(checkpoint, STEPS, saved_by), locate_in(checkpoint), policy)


def all_bits(path: Path) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in torch.load(path, weights_only=True).items()}
