"""The demo's kills happen at their points and count only when they truly happened. Real processes, no cluster."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastgood.client.demo.kills import ALL_STAGED, STAGING_BEGINS, Kills, gone
from lastgood.client.demo.recipe import Recipe
from lastgood.storage.failpoints import VARIABLE, failpoint, fired

RECIPE = Recipe(steps=12, save_freq=3)  # kills at the saves of steps 6 and 9


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def ranks_of(*pids: int) -> Any:
    return SimpleNamespace(pids=list(pids))


def test_the_rank_dies_while_the_stager_is_stopped_and_the_stager_goes_on(
    tmp_path: Path, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    kills = Kills(RECIPE, tmp_path, on_event=lambda _: None)
    kills.arm_for(3, ranks_of(0, victim.pid))
    assert not (tmp_path / STAGING_BEGINS).exists()  # nothing is planned for the save of step 3
    kills.arm_for(6, ranks_of(0, victim.pid))
    assert victim.poll() is None  # it lives until the point is passed
    stager = threading.Thread(target=failpoint, args=(STAGING_BEGINS,))
    stager.start()
    kills.settle()
    stager.join(30)
    assert not stager.is_alive()
    assert victim.wait(30) == -9
    assert kills.rank.happened
    assert f"pid {victim.pid}" in kills.rank.story
    kills.close()


def test_each_kill_is_armed_once_even_when_its_step_is_run_again(
    tmp_path: Path, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    kills = Kills(RECIPE, tmp_path, on_event=lambda _: None)
    kills.arm_for(6, ranks_of(0, victim.pid))
    failpoint(STAGING_BEGINS)
    kills.settle()
    kills.arm_for(6, ranks_of(0, victim.pid))
    assert not (tmp_path / STAGING_BEGINS).exists()
    kills.close()


def test_the_coordinators_death_is_seen_by_its_point(tmp_path: Path):
    kills = Kills(RECIPE, tmp_path, on_event=lambda _: None)
    kills.arm_for(9, ranks_of(0, 0))
    code = f"from lastgood.storage.failpoints import failpoint; failpoint({ALL_STAGED!r})"
    coordinator = subprocess.run([sys.executable, "-c", code], env={VARIABLE: str(tmp_path)}, check=False, timeout=60)
    assert coordinator.returncode == -9
    kills.settle()
    assert kills.coordinator.happened
    kills.close()


def test_a_point_that_is_never_passed_is_not_a_kill(tmp_path: Path, victim: subprocess.Popen[bytes]):
    kills = Kills(RECIPE, tmp_path, on_event=lambda _: None)
    kills.arm_for(6, ranks_of(0, victim.pid))
    kills.close()
    assert not kills.rank.happened
    assert "never passed" in kills.rank.story
    assert not fired(tmp_path, STAGING_BEGINS)
    assert victim.poll() is None


def test_gone_tells_a_living_process_from_an_ended_one(victim: subprocess.Popen[bytes]):
    assert not gone(victim.pid)
    victim.kill()
    victim.wait(30)
    assert gone(victim.pid)
