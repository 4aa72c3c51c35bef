"""Host memory for images is short, or gone: one attempt is lost, needed and free bytes are told, nothing stays held."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from lastgood.storage.errors import StagingError
from lastgood.workers.images import SHARED_MEMORY, ImageRoom
from tests.containment.disks import full, tmpfs, without_inodes
from tests.containment.small_run import SmallRun, seconds_of, until


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    """A run whose node 1 has 4 MiB of shared memory."""
    with tmpfs(tmp_path / "images-1"):
        here = SmallRun(tmp_path)
        yield here
        here.close()


@pytest.mark.parametrize(
    ("fault", "says"),
    [(full, r"too small for an image of [\d,]+ bytes: .* has 0 bytes free"), (without_inodes, "no inode")],
)
def test_shared_memory_that_is_full_costs_one_attempt(
    run: SmallRun, fault: Callable[[Path], AbstractContextManager[None]], says: str
) -> None:
    with fault(run.nodes[1].images):
        told = run.fails(1, says, "previous checkpoint stands", phase="snapshotting", node=1, member=1)
        assert seconds_of(told) < 20  # the deadline is 30
        run.clean()
    run.commits(2)


def test_a_state_that_outgrows_shared_memory_is_refused_and_the_old_size_still_fits(run: SmallRun) -> None:
    run.commits(1)
    before = run.nodes[1].image_bytes()
    weights = run.nodes[1].state["weights"]
    small, weights.value = weights.value, torch.zeros(2_000_000)
    for step in (2, 3):
        run.fails(step, "too small for an image of 8,", "bytes free", phase="snapshotting", node=1, member=1)
        run.clean()
    weights.value = small
    run.commits(4)
    assert run.nodes[1].image_bytes() == before


def test_an_image_that_was_cleaned_away_is_told_as_such(run: SmallRun) -> None:
    run.commits(1)
    weights = run.nodes[1].state["weights"]
    weights.value = torch.zeros(400_000)  # needs a larger image
    folder = run.nodes[1].stager._staging._room.folder
    hidden = folder.with_name("elsewhere")
    folder.rename(hidden)
    run.fails(2, "clean up in image_root", phase="snapshotting", node=1, member=1)
    hidden.rename(folder)
    run.commits(3)


def test_a_stager_that_finds_no_room_for_its_images_says_so(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "images") as images, without_inodes(images):
        with pytest.raises(StagingError, match=r"no images can be kept .*image_root"):
            ImageRoom(images, "run", "node", "first")
        assert not list(images.glob("lastgood.*"))


_DIES = """
import sys
from pathlib import Path
from lastgood.workers.images import Image
image = Image.open(Path(sys.argv[1]))
image.begin(sys.argv[2])
image.seal(4096)
"""


def test_images_of_a_process_that_died_after_its_attempt_was_given_up_are_not_kept(run: SmallRun) -> None:
    """They are sealed, and sealed images outlive their process; but nobody will ever stage these."""
    run.commits(1)
    node = run.nodes[1]
    attempt = run.driver.core.attempts[next(iter(run.driver.core.attempts))].head
    image = next(image for key, image in node.stager._staging._slots.images() if key[1] == "cursor")
    image.free()

    async def give_up() -> None:
        node.stager._staging.give_up("A2")

    run.loop.run(give_up())
    subprocess.run([sys.executable, "-c", _DIES, str(image.path), "A2"], check=True)
    assert image.state.name == "SEALED" and attempt.attempt != "A2"
    node.agent.close()
    until(lambda: not image.path.exists(), "the image is unlinked")


CGROUPS = Path("/sys/fs/cgroup")
_IN_A_CGROUP = """
import os, sys
from pathlib import Path
from lastgood.storage.errors import SnapshotError
from lastgood.workers.images import SHARED_MEMORY, ImageRoom
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
room = ImageRoom(Path(sys.argv[2]), "run", "node", "first")
room.create(20_000_000)
try:
    room.create(400_000_000)
except SnapshotError as error:
    print(error)
room.create(10_000_000)
print("goes on")
room.close()
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup with 200 MB of memory."""
    first = (CGROUPS / "memory").is_dir()
    top = CGROUPS / "memory" if first else CGROUPS
    group = top / f"lastgood-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text("200000000")
    except OSError as error:
        group.rmdir()
        pytest.skip(f"no memory limit can be set here: {error}")
    yield group
    group.rmdir()


def test_an_image_that_the_container_has_no_memory_for_is_refused_and_nobody_is_killed(small_cgroup: Path) -> None:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as images:  # has room enough by itself
        child = subprocess.run(
            [sys.executable, "-c", _IN_A_CGROUP, str(small_cgroup), images], capture_output=True, text=True, check=False
        )
    assert child.returncode == 0, child.stderr
    assert f"bytes: cgroup {small_cgroup} has" in child.stdout
    assert "memory is too small for an image of 400," in child.stdout
    assert child.stdout.endswith("goes on\n")
