"""Images: host memory that a member fills and the node's stager writes to disk.

An image is a plain file under /dev/shm (never multiprocessing.shared_memory, which unlinks it when its creator is
killed). The stager creates and unlinks it; a member only maps and fills it. Its first page is a header that holds the
attempt and the state, so that a half-copied image is never staged; the rest is the shard file, byte for byte.

    free -> filling -> sealed -> staged -> free        (a member moves the first two arrows, the stager the others)
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import mmap
import os
import shutil
import struct
from pathlib import Path

from ..storage.direct import PAGE_BYTES
from ..storage.errors import SnapshotError, StagingError
from .memory_budget import memory_budget

SHARED_MEMORY = Path("/dev/shm")

_MAGIC = b"LGIMAGE1"
_HEADER = struct.Struct("<8sIIQQ64s")  # magic, state, zero, capacity, used bytes, attempt id padded with zeros
_STATE_OFFSET = 8
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of madvise(2), Linux 5.14; Python 3.11 has no name for it
_FAULT_BYTES = 8 << 20  # some 2,000 pages: a millisecond
HEADER_BYTES = PAGE_BYTES  # before the shard file in an image


class ImageState(enum.IntEnum):
    """Who may touch the image next."""

    FREE = 0  # the stager may hand it out
    FILLING = 1  # a member is copying into it
    SEALED = 2  # whole; the stager may write it to disk, nobody may change it
    STAGED = 3  # on disk; the stager may free it


def rounded_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Image:
    """One mapped image. `payload` is the shard file's room: `capacity` bytes after the header page.

    The member that fills it may write between `begin` and `seal`; from then on nobody may, until it is free again.
    """

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._view = memoryview(mapping)
        magic, _, _, capacity, _, _ = _HEADER.unpack_from(self._view)
        if magic != _MAGIC or HEADER_BYTES + capacity != len(mapping):
            self.close()
            raise SnapshotError(f"{path} is not an image of lastgood; remove it if nothing uses it", path=str(path))
        self.capacity = capacity
        self.payload = self._view[HEADER_BYTES:]

    @classmethod
    def create(cls, path: Path, payload_bytes: int) -> Image:
        """Creates the file with all its pages reserved (a full /dev/shm is an error here, never a SIGBUS later).

        Raises SnapshotError naming needed and free bytes when shared memory is too small (or has no names left, or is
        gone); nothing is left behind then.
        """
        capacity = rounded_up(payload_bytes)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _no_image(path, HEADER_BYTES + capacity, error) from error
        try:
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + capacity)
            os.pwrite(descriptor, _HEADER.pack(_MAGIC, ImageState.FREE, 0, capacity, 0, b""), 0)
            mapping = mmap.mmap(descriptor, HEADER_BYTES + capacity)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _no_image(path, HEADER_BYTES + capacity, error) from error
        finally:
            os.close(descriptor)
        return cls(path, mapping)

    @classmethod
    def open(cls, path: Path) -> Image:
        """Maps an image that the stager created. Raises SnapshotError when it is not one (or this is another node)."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise SnapshotError(
                f"the stager's image {path} is not visible in this process: member and stager do not share "
                f"{path.parent}. Run both in the same container, or mount one tmpfs into both.",
                path=str(path),
            ) from error
        try:
            return cls(path, mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    def fault_in(self) -> None:
        """Maps every page here now, so that the first copy into it does not. Older kernels do nothing."""
        for begin in range(0, len(self._mapping), _FAULT_BYTES):  # in pieces: Python holds its lock meanwhile
            try:
                self._mapping.madvise(_POPULATE_WRITE, begin, min(_FAULT_BYTES, len(self._mapping) - begin))
            except OSError:
                return

    @property
    def state(self) -> ImageState:
        return ImageState(_HEADER.unpack_from(self._view)[1])

    @property
    def attempt(self) -> str:
        """The attempt it was last filled for; empty when never filled."""
        return _HEADER.unpack_from(self._view)[5].rstrip(b"\0").decode()

    @property
    def used_bytes(self) -> int:
        """Length of the shard file in it, valid once sealed."""
        return _HEADER.unpack_from(self._view)[4]

    def begin(self, attempt: str) -> None:
        """The member starts to fill it for `attempt`. Raises SnapshotError unless it is free."""
        if self.state is not ImageState.FREE:
            raise SnapshotError(
                f"image {self.path} is {self.state.name.lower()} for attempt {self.attempt}, so it cannot be filled "
                f"for {attempt}: the stager has not released it yet",
                path=str(self.path),
            )
        self._store(ImageState.FILLING, 0, attempt)

    def seal(self, used_bytes: int) -> None:
        """The member is done: `used_bytes` of payload are the shard file, whole."""
        if self.state is not ImageState.FILLING or used_bytes > self.capacity:
            raise SnapshotError(
                f"image {self.path} ({self.state.name.lower()}, {self.capacity} bytes) cannot be sealed at "
                f"{used_bytes} bytes; this is a bug in lastgood",
                path=str(self.path),
            )
        self._store(ImageState.SEALED, used_bytes, self.attempt)

    def seal_for(self, attempt: str) -> None:
        """What it holds is that attempt's from now on, and not staged for it yet."""
        self._store(ImageState.SEALED, self.used_bytes, attempt)

    def mark_staged(self) -> None:
        """The stager has it on disk."""
        self._store(ImageState.STAGED, self.used_bytes, self.attempt)

    def free(self) -> None:
        """The stager gives it back: it may be filled again."""
        self._store(ImageState.FREE, 0, "")

    def _store(self, state: ImageState, used_bytes: int, attempt: str) -> None:
        # Everything else first, the state last and in one aligned store: a reader never sees a new state over old
        # facts.
        before = struct.unpack_from("<I", self._view, _STATE_OFFSET)[0]
        _HEADER.pack_into(self._view, 0, _MAGIC, before, 0, self.capacity, used_bytes, attempt.encode())
        struct.pack_into("<I", self._view, _STATE_OFFSET, int(state))

    def close(self) -> None:
        """Unmaps it here. Views that callers still hold keep the memory until they are dropped."""
        for view in (getattr(self, "payload", None), self._view):
            if view is not None:
                try:
                    view.release()
                except BufferError:  # a tensor still looks at it; the mapping goes with the last view
                    return
        try:
            self._mapping.close()
        except BufferError:
            return


def _no_image(path: Path, needed_bytes: int, error: OSError) -> SnapshotError:
    """Why there is no image, for a person."""
    try:
        found = os.statvfs(path.parent)
    except OSError:  # the folder itself is gone
        found = None
    free = None if found is None else found.f_bavail * found.f_frsize
    facts = {"needed_bytes": needed_bytes, "free_bytes": free, "path": str(path), "errno": error.errno}
    if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT) or found is None or free is None:
        return SnapshotError(
            f"an image of {needed_bytes:,} bytes cannot be made at {path}: {error.strerror}. The previous checkpoint "
            "stands. Does something clean up in image_root while lastgood runs?",
            **facts,
        )
    if free >= needed_bytes and found.f_files and not found.f_favail:
        return SnapshotError(
            f"shared memory has no room for another file: {path.parent} has {free:,} bytes free and no inode. The "
            "previous checkpoint stands. Remove files there, or set image_root to a tmpfs with a larger nr_inodes.",
            **facts,
        )
    return SnapshotError(
        f"shared memory is too small for an image of {needed_bytes:,} bytes: {path.parent} has {free:,} bytes free. "
        "The previous checkpoint stands. Give the container more shared memory (--shm-size, or a larger tmpfs) or set "
        "image_root to a larger tmpfs.",
        **facts,
    )


def _require_memory(needed_bytes: int) -> None:
    """Raises SnapshotError when the host, or a cgroup, has no `needed_bytes` left to take."""
    budget = memory_budget()
    if budget is not None and needed_bytes > budget.left_bytes:
        raise SnapshotError(
            f"memory is too small for an image of {needed_bytes:,} bytes: {budget.whose} has {budget.free_bytes:,} of "
            f"{budget.total_bytes:,} bytes free, and {budget.kept_bytes:,} of these must stay so (beyond it Ray, or "
            "the kernel, ends processes). Nothing was copied; the previous checkpoint stands. Give the node or the "
            "container more memory, or keep less state in host memory.",
            needed_bytes=needed_bytes,
            free_bytes=budget.left_bytes,
        )


class ImageRoom:
    """The stager's images on this node: one folder in shared memory, locked while the stager lives.

    The folder's name carries uid, run, node and the stager's incarnation. Leftovers of killed stagers are recognised
    (nobody holds their lock) and swept by the next stager of this user, of whatever run: they hold host memory.
    """

    def __init__(self, root: Path, run: str, node: str, incarnation: str) -> None:
        prefix = f"lastgood.{os.getuid()}."
        self._sweep(root, prefix)
        self.folder = root / f"{prefix}{run}.{node}.{incarnation}"
        while not self._lock_folder(root):
            pass  # another stager began to sweep it before it was locked
        self._count = 0

    def _lock_folder(self, root: Path) -> bool:
        """Makes the folder and locks it; answers whether it is still there then. Raises StagingError."""
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and root.is_dir():
                return False
            shutil.rmtree(self.folder, ignore_errors=True)
            raise StagingError(
                f"no images can be kept in {root}: {error.strerror}. Nothing was changed. Make room there, or set "
                f"image_root to a tmpfs that uid {os.getuid()} may write to.",
                path=str(root),
                errno=error.errno,
            ) from error
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if (self.folder / "lock").stat().st_ino == os.fstat(self._lock).st_ino:
                return True
        os.close(self._lock)
        return False

    def create(self, payload_bytes: int) -> Image:
        """A fresh image with room for `payload_bytes`. Raises SnapshotError when memory is too small."""
        _require_memory(HEADER_BYTES + rounded_up(payload_bytes))
        self._count += 1
        return Image.create(self.folder / f"image-{self._count:06d}", payload_bytes)

    def destroy(self, image: Image) -> None:
        """Unlinks an image. A process that still maps it keeps its memory until it unmaps."""
        image.path.unlink(missing_ok=True)
        image.close()

    def nbytes(self) -> int:
        """Bytes of shared memory that the images here take."""
        return sum(entry.stat().st_size for entry in self.folder.glob("image-*"))

    def close(self) -> None:
        """Removes the folder with every image in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    @staticmethod
    def _sweep(root: Path, prefix: str) -> None:
        for folder in root.glob(f"{prefix}*"):
            try:
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                continue  # somebody else's folder, or just swept by another stager
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                pass  # its stager lives
            finally:
                os.close(lock)
