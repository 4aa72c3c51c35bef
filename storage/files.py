"""Writing that survives: files appear whole or not at all, and are on the disk when a call returns.

The rule: content first, then fsync, then the name, then fsync of the directory. A name that decides something is
made by `link`, which exactly one process wins and which never shows an empty file. A failed fsync is never repeated
(the kernel may have dropped the pages): the file is removed and the write fails.

Failures of the operating system become StagingError; the store hands in its own translation.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .crew import Crew
from .digest import DEFAULT_BLOCK_BYTES, DEFAULT_THREADS, BlockDigests, block_ranges
from .direct import PAGE_BYTES, DirectMode, whole_pages_bytes
from .errors import IntegrityError, LastgoodError, StagingError
from .failpoints import failpoint
from .ids import ulid

WRITE_BYTES = 8 << 20  # handed to one write call
READ_BYTES = 1 << 20
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
TEMPORARY_SUFFIX = ".tmp"

OnError = Callable[[str, Path, OSError], LastgoodError]  # (what was being done, where, what happened) -> what to raise


def free_bytes(path: Path) -> int | None:
    """Bytes free to this process on the file system of `path` or its nearest parent; None when it cannot be told."""
    for place in (path, *path.parents):
        try:
            found = os.statvfs(place)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return None


def os_advice(error: OSError) -> str:
    """What a person can do about an error of the operating system."""
    if error.errno in FULL:
        return "free space there, lower the number of checkpoints kept, or choose a larger disk"
    if error.errno in DENIED:
        return "give this user write permission there, or choose another directory"
    return "look at the disk or mount (dmesg), then save again"


def staging_error(action: str, path: Path, error: OSError) -> StagingError:
    """The staging directory's failure, with everything a person needs."""
    free = free_bytes(path)
    return StagingError(
        f"cannot {action} {path}: {_name(error)} ({free} bytes are free there). What stood there before stands "
        f"unchanged; {os_advice(error)}.",
        path=str(path),
        errno=error.errno,
        free_bytes=free,
    )


def _name(error: OSError) -> str:
    code = errno.errorcode.get(error.errno, str(error.errno)) if error.errno is not None else type(error).__name__
    return f"{error.strerror or error} [{code}]"


@contextlib.contextmanager
def translated(action: str, path: Path, on_error: OnError) -> Iterator[None]:
    """Turns an OSError of the block into what `on_error` makes of it."""
    try:
        yield
    except OSError as error:
        raise on_error(action, path, error) from error


def fsync_dir(path: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems without it commit names by themselves
            raise
    finally:
        os.close(fd)


def make_dirs_durably(
    path: Path, on_error: OnError = staging_error, trusted: set[tuple[int, int]] | None = None
) -> None:
    """Creates a directory and its parents; each new name is durable when this returns. Existing ones are fine.

    Where other processes make directories too, the last one that stands may be new, its maker killed before it could
    make the name durable (what stands above it was synced before anything was made in it). Give `trusted` there, a
    set that this function fills with (device, inode) of the directories it knows to be durable: others are synced.
    """
    with translated("create the directory", path, on_error):
        missing = []
        place = path
        while not place.is_dir():
            missing.append(place)
            place = place.parent
        if trusted is not None and _identity(place) not in trusted:
            with contextlib.suppress(PermissionError):  # above a root that a person made, where nobody else makes any
                fsync_dir(place.parent)
            trusted.add(_identity(place))
        for place in reversed(missing):
            place.mkdir(exist_ok=True)
            fsync_dir(place.parent)
            if trusted is not None:
                trusted.add(_identity(place))


def _identity(place: Path) -> tuple[int, int]:
    found = place.stat()
    return found.st_dev, found.st_ino


def is_temporary(name: str) -> bool:
    """Whether a file's name is that of a write that never finished; such files mean nothing and may be deleted."""
    return name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)


def temporary_beside(path: Path) -> Path:
    """A fresh name in the same directory that no reader takes for anything."""
    return path.with_name(f".{path.name}.{ulid()}{TEMPORARY_SUFFIX}")


def write_all(fd: int, data: memoryview, at: int) -> None:
    """Writes all of `data` at offset `at`, over short writes. Raises OSError."""
    while len(data):
        written = os.pwrite(fd, data, at)
        if written == 0:
            raise OSError(errno.EIO, "the disk takes no more bytes")
        data, at = data[written:], at + written


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = temporary_beside(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            write_all(fd, memoryview(data), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        remove_quietly(temporary)
        raise
    return temporary


def remove_quietly(path: Path) -> bool:
    """Deletes a temporary file; answers whether it is gone. A failure costs space only: readers skip such names."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def link_into_place(temporary: Path, path: Path) -> bool:
    """Gives a finished, fsynced temporary file its final name, unless that stands already; both are durable then.

    Answers whether the name is now this file's. A link whose outcome is unknown (NFS may retransmit it and then
    report EEXIST about itself) is read back, never assumed. Raises OSError when nothing stands there.
    """
    try:
        os.link(temporary, path)
        won = True
    except OSError as error:
        if error.errno in _NO_LINKS and not path.exists():
            raise OSError(
                error.errno, f"this file system cannot link, so it cannot create a file exclusively ({error.strerror})"
            ) from error
        try:
            won = os.path.samestat(temporary.lstat(), path.lstat())
        except FileNotFoundError:
            raise error from None
    failpoint("storage.create_once.after_link")
    fsync_dir(path.parent)  # also when lost: whoever reads the winner's word may act on it
    return won


def create_once(path: Path, data: bytes, on_error: OnError = staging_error) -> bool:
    """Creates a file with this content unless the name stands already; answers whether this call created it.

    Exactly one of any number of racing processes gets True; no reader ever sees a part of the file; it is durable
    when this returns. Raises StagingError when it could not be told or done: then ask again, the answer is the same.
    """
    with translated("create", path, on_error):
        temporary = _write_temporary(path, data)
        try:
            failpoint("storage.create_once.before_link")
            return link_into_place(temporary, path)
        finally:
            remove_quietly(temporary)


def replace_durably(path: Path, data: bytes, on_error: OnError = staging_error) -> None:
    """Replaces (or creates) a file: every reader sees the old content or the new, and the new is durable at return.

    Raises StagingError; then the old content stands, unless the failure came after the rename.
    """
    with translated("replace", path, on_error):
        temporary = _write_temporary(path, data)
        try:
            failpoint("storage.replace.before_rename")
            try:
                temporary.replace(path)
            except FileNotFoundError:
                if path.read_bytes() != data:  # a rename that NFS sent twice reports ENOENT though it worked
                    raise
            fsync_dir(path.parent)
        finally:
            remove_quietly(temporary)


class WriteProgress:
    """How far one write has come, for others to look at while it runs, or to end it before its next piece."""

    def __init__(self) -> None:
        self.done_bytes = 0  # of pieces that are written, wherever in the file they lie
        self.ended = False  # it is over, well or not
        self._given_up = threading.Event()
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Another piece is written. Any thread may tell."""
        with self._lock:
            self.done_bytes += nbytes

    def give_up(self) -> None:
        """Nobody needs the file any more: the write ends with StagingError at its next piece."""
        self._given_up.set()

    def check(self, path: Path, nbytes: int) -> None:
        """Raises StagingError once the write has been given up."""
        if self._given_up.is_set():
            raise StagingError(
                f"the write of {path} was given up after {self.done_bytes} of {nbytes} bytes: its attempt had failed "
                "elsewhere. The partial file is removed; the previous checkpoint stands.",
                path=str(path),
                done_bytes=self.done_bytes,
                nbytes=nbytes,
            )


def write_image(
    buffer: memoryview,
    path: Path,
    *,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    threads: int = DEFAULT_THREADS,
    start_thread: Callable[[], None] = lambda: None,
    sync_directory: bool = True,
    progress: WriteProgress | None = None,
) -> BlockDigests:
    """Writes a shard file from memory on `threads` threads while as many hash it; whole and fsynced at return.

    A buffer that begins at a page is written past the page cache where the file system can (see direct.py). Each thread
    calls `start_thread` first. The file has its name only once it is whole; one that stood there is replaced. The
    caller may not change the buffer until this returns. With `sync_directory=False` the caller owes
    fsync_dir(path.parent) before it tells. Raises StagingError with path, done_bytes, errno and free_bytes, or without
    errno once `progress` was given up; no thread writes any more then, and the partial file is removed.
    """
    view = memoryview(buffer).cast("B")
    temporary = temporary_beside(path)
    progress = progress if progress is not None else WriteProgress()
    try:
        failpoint("storage.write_image.begin")
        progress.check(path, len(view))
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with _closing(fd), Crew(threads, start_thread) as crew:
            _preallocate(fd, len(view))
            _write_pieces(fd, view, path, block_bytes, crew, progress)
            failpoint("storage.write_image.before_fsync")
            os.fsync(fd)
            digests = BlockDigests.of_blocks(len(view), block_bytes, crew.digests())
        temporary.replace(path)
        if sync_directory:
            fsync_dir(path.parent)
    except BaseException as error:
        removed = remove_quietly(temporary)
        if not isinstance(error, OSError):
            raise
        free = free_bytes(path)
        what = "removed" if removed else f"left as {temporary}: it cannot be removed"
        raise StagingError(
            f"cannot write {path}: {_name(error)} after {progress.done_bytes} of {len(view)} bytes ({free} bytes are "
            f"free there). The partial file was {what}; the previous checkpoint stands; {os_advice(error)}.",
            path=str(path),
            done_bytes=progress.done_bytes,
            nbytes=len(view),
            errno=error.errno,
            free_bytes=free,
        ) from error
    return digests


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    """Closes `fd` at the end. That may be what reports a full disk; after another error it is a note of that one."""
    try:
        yield
    except BaseException as error:
        try:
            os.close(fd)
        except OSError as second:
            error.add_note(f"Closing the file failed as well: {_name(second)}.")
        raise
    os.close(fd)


def _write_pieces(fd: int, view: memoryview, path: Path, block_bytes: int, crew: Crew, progress: WriteProgress) -> None:
    """Writes it all, whole pages directly if possible; the crew still hashes when this returns. Raises OSError."""
    mode = DirectMode(fd, path)
    direct_bytes = whole_pages_bytes(view)
    if direct_bytes and not mode.turn_on():
        direct_bytes = 0

    def write(begin: int, end: int) -> None:
        progress.check(path, len(view))
        if begin <= len(view) // 2 < end:
            failpoint("storage.write_image.middle")
        mode.attempt(lambda: write_all(fd, view[begin:end], begin))
        progress.add(end - begin)

    if direct_bytes:
        piece_bytes = max(PAGE_BYTES, WRITE_BYTES - WRITE_BYTES % PAGE_BYTES)
        crew.work(view, block_bytes, list(block_ranges(direct_bytes, piece_bytes)), write, at_once=True)
        mode.turn_off()
        if direct_bytes < len(view):
            write(direct_bytes, len(view))
    else:  # one thread: the kernel lets one at a time copy into a file's pages
        crew.work(view, block_bytes, list(block_ranges(len(view), WRITE_BYTES)), write, at_once=False)


def link_image(source: Path, path: Path, image: memoryview) -> bool:
    """Gives the shard file at `source` a second name, durable at return, if the disk holds exactly `image` there.

    Answers False when it does not (it has rotted, or is gone), cannot be linked there, or something stands at `path`.
    Raises StagingError when the name cannot be made durable.
    """
    try:
        if not _holds(source, image):
            return False
        os.link(source, path)
    except (OSError, IntegrityError):
        return False
    with translated("sync the directory", path.parent, staging_error):
        fsync_dir(path.parent)
    return True


def _holds(path: Path, image: memoryview) -> bool:
    """Compares every byte with the disk's. Raises IntegrityError for what is no plain file, OSError."""
    fd = open_regular(path)
    try:
        if os.fstat(fd).st_size != len(image):
            return False
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # not what some cache remembers
        scratch = memoryview(bytearray(min(READ_BYTES, len(image))))
        for at in range(0, len(image), READ_BYTES):
            part = image[at : at + READ_BYTES]
            piece = scratch[: len(part)]
            if read_range_into(fd, piece, at) != len(part):
                return False
            if not np.array_equal(np.frombuffer(piece, np.uint8), np.frombuffer(part, np.uint8)):
                return False
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return True
    finally:
        os.close(fd)


def _preallocate(fd: int, nbytes: int) -> None:
    """Takes the space at once, so that a full disk is known before anything is copied."""
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV):
            raise


def open_regular(path: Path) -> int:
    """A descriptor for reading a plain file; its last part may not be a symbolic link. The caller closes it.

    Raises IntegrityError for a link, directory, pipe or device, OSError (FileNotFoundError) otherwise.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_plain(path, "a symbolic link" if error.errno == errno.ELOOP else "a socket or device") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_plain(path, "not a plain file")
    return fd


def _not_plain(path: Path, what: str) -> IntegrityError:
    return IntegrityError(
        f"{path} is {what}, and checkpoints consist of plain files. It was not read; find out who put it there.",
        path=str(path),
    )


def read_regular(path: Path, limit_bytes: int = 1 << 30) -> bytes:
    """The content of a plain file of at most `limit_bytes`. Raises as open_regular does, IntegrityError if longer."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise IntegrityError(
            f"{path} is longer than {limit_bytes} bytes, which no file of its kind is. It was not used; "
            "find out who put it there.",
            path=str(path),
        )
    return data


def read_range_into(fd: int, target: memoryview, at: int) -> int:
    """Reads from offset `at` until `target` is full or the file ends; answers the bytes read. Raises OSError."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done : done + WRITE_BYTES]], at + done)
        if count == 0:
            break
        done += count
    return done


def digest_file(fd: int, nbytes: int, block_bytes: int, threads: int = DEFAULT_THREADS) -> BlockDigests:
    """Block digests of the first `nbytes` of an open file, in READ_BYTES of memory per thread.

    Raises OSError; EIO when the file ends early (it shrank meanwhile).
    """

    def one(part: tuple[int, int]) -> str:
        state, scratch = hashlib.sha256(), memoryview(bytearray(min(READ_BYTES, part[1] - part[0])))
        for at in range(part[0], part[1], READ_BYTES):
            piece = scratch[: min(READ_BYTES, part[1] - at)]
            if read_range_into(fd, piece, at) != len(piece):
                raise OSError(errno.EIO, f"the file ends before byte {part[1]}")
            state.update(piece)
        return state.hexdigest()

    with ThreadPoolExecutor(max(1, threads), "lastgood-hash") as pool:
        blocks = tuple(pool.map(one, block_ranges(nbytes, block_bytes)))
    return BlockDigests.of_blocks(nbytes, block_bytes, blocks)
