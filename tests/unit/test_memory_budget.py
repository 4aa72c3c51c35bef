"""What memory may be taken: of the host, of cgroups of both versions, as containers see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.workers.memory_budget import Budget, memory_budget

MB = 1_000_000
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\nHugePages_Total:   0\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1,024,000 bytes, 614,400 of them free, without cgroups."""
    monkeypatch.delenv("RAY_memory_usage_threshold", raising=False)
    put(tmp_path / "proc/meminfo", MEMINFO)
    put(tmp_path / "proc/self/cgroup", "")
    return tmp_path


def tightest(root: Path = Path("/")) -> Budget:
    """The budget, which there is."""
    budget = memory_budget(root)
    assert budget is not None
    return budget


def put(file: Path, text: str | int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def second_version(folder: Path, most: str | int, used: int, idle: int = 0) -> None:
    put(folder / "memory.max", most)
    put(folder / "memory.current", used)
    put(folder / "memory.stat", f"anon 5\nfile 7\ninactive_file {idle}")


def test_of_a_host_what_ray_leaves_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = tightest(root)
    assert (budget.free_bytes, budget.total_bytes, budget.whose) == (614_400, 1_024_000, "the host")
    assert budget.left_bytes == 614_400 - 51_200
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.5")
    assert tightest(root).left_bytes == 614_400 - 512_000
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.2")
    assert tightest(root).left_bytes == 0


def test_the_tightest_cgroup_above_counts_and_idle_page_cache_is_free(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/pod/worker\n")
    second_version(root / "sys/fs/cgroup/pod/worker", "max", 10)
    second_version(root / "sys/fs/cgroup/pod", 200_000, 150_000, 40_000)
    budget = tightest(root)
    assert budget.free_bytes == 90_000
    assert budget.left_bytes == 80_000
    assert budget.whose.endswith("cgroup/pod")


def test_a_container_sees_only_the_top_of_its_own_cgroups(root: Path) -> None:
    put(root / "proc/self/cgroup", "0::/system.slice/docker-1234\n")  # as the host names it
    second_version(root / "sys/fs/cgroup", 100_000, 30_000)
    assert tightest(root).free_bytes == 70_000


def test_the_first_version_of_cgroups(root: Path) -> None:
    put(root / "proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n")
    folder = root / "sys/fs/cgroup/memory/a"
    put(folder / "memory.limit_in_bytes", 100_000)
    put(folder / "memory.usage_in_bytes", 60_000)
    put(folder / "memory.stat", "inactive_file 1\ntotal_inactive_file 20000")
    assert tightest(root).free_bytes == 60_000


def test_no_limit_is_none(root: Path) -> None:
    put(root / "proc/self/cgroup", "4:memory:/a\n0::/\n")
    folder = root / "sys/fs/cgroup/memory/a"
    put(folder / "memory.limit_in_bytes", 9223372036854771712)
    put(folder / "memory.usage_in_bytes", 60_000)
    put(folder / "memory.stat", "total_inactive_file 0")
    assert tightest(root).whose == "the host"


def test_this_machine_has_some_left() -> None:
    budget = tightest()
    assert 0 < budget.left_bytes <= budget.total_bytes


def test_a_system_that_tells_nothing_or_nonsense_sets_no_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root / "proc/self/cgroup", "0::/pod\n4:memory:/a\nnonsense\n")
    second_version(root / "sys/fs/cgroup/pod", "a lot", 5)
    monkeypatch.setenv("RAY_memory_usage_threshold", "most")
    assert tightest(root).left_bytes == 614_400 - 51_200
    put(root / "proc/meminfo", "MemTotal: 5 kB")
    assert memory_budget(root) is None
    (root / "proc/self/cgroup").unlink()
    assert memory_budget(root / "nowhere") is None
