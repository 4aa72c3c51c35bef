"""The store: where checkpoints become durable. `Store` is the whole surface; every kind of store answers it fully.

The rule: an object stands whole or not at all, and a write whose outcome is unknown is read back, never assumed. A
store says what it can promise (`guarantees`) instead of pretending; no decision is taken through what it cannot.
"""

from __future__ import annotations

import builtins
import errno
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable
from urllib.parse import unquote, urlsplit

from . import files
from .digest import BlockDigests, RunningDigest
from .errors import AlreadyExistsError, IntegrityError, LastgoodError, OptionsError, StoreError, StoreUnavailableError
from .failpoints import failpoint
from .ids import new_id
from .layout import check_relative, confine

ABANDONED_S = 24 * 3600.0  # a write to which nothing was added for so long has no writer

T = TypeVar("T")

_UNREACHABLE = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENODEV,
        errno.ENXIO,
        errno.ESHUTDOWN,
        errno.EREMOTEIO,
    }
)


@dataclass(frozen=True)
class Guarantees:
    """What a store can promise; said at attach."""

    exclusive_create: bool  # create_exclusive has exactly one winner
    conditional_replace: bool  # replace_if is atomic; otherwise what it writes is a hint
    sentence: str


@runtime_checkable
class Store(Protocol):
    """Objects under keys (layout.RunPaths makes them). This is the whole surface, so that a store is easy to add.

    All methods may be called from several threads. All raise StoreUnavailableError when the outcome is unknown (ask
    again), StoreError for other failures, IntegrityError for keys that could leave the root.
    """

    @property
    def url(self) -> str:
        """The root, as the user may give it to open_store again."""
        ...

    @property
    def guarantees(self) -> Guarantees: ...

    def probe(self, folder: str) -> None:
        """Writes, reads back and removes an object below the key `folder`.

        Raises StoreError saying what is wrong with the root (or that it is not there: a lost mount must not become a
        directory).
        """
        ...

    def create_exclusive(self, key: str, data: bytes) -> bool:
        """Creates an object unless the key stands. True: it stands with this content, by this call. False: it stood."""
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Replaces or creates an object; readers see the old or the new, whole."""
        ...

    def replace_if(self, key: str, data: bytes, etag: str | None) -> bool:
        """Replaces an object if its etag is still this one (None: if it is not there); answers whether it did.

        Atomic only where guarantees.conditional_replace says so.
        """
        ...

    def put_file(self, key: str, path: Path, digests: BlockDigests, same_as: str | None = None) -> None:
        """Copies a local file, checks every block against `digests` on the way and once it stands there.

        `same_as`: a key under which these bytes stood. Where they do, whole, and the store can give an object a second
        name, it does that instead.
        Idempotent: when these bytes stand already, nothing happens. Raises AlreadyExistsError when others do,
        IntegrityError when the local file is not what `digests` say (nothing appears under the key then).
        """
        ...

    def get(self, key: str) -> bytes:
        """An object's bytes. Raises StoreError with missing=True when there is none."""
        ...

    def find(self, key: str) -> bytes | None:
        """An object's bytes; None when there is none."""
        ...

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` (exclusive) of an object; raises IntegrityError when it is shorter."""
        ...

    def list(self, prefix: str) -> Sequence[str]:
        """All keys that begin with the text `prefix`, sorted; unfinished writes are not listed."""
        ...

    def head(self, key: str) -> tuple[int, str] | None:
        """(length in bytes, etag) of an object; None when there is none. The etag is no digest."""
        ...

    def delete_many(self, keys: Iterable[str]) -> None:
        """Deletes objects; missing ones are fine. Tries all, then raises StoreError naming those that stayed."""
        ...

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Deletes what writes that never finished have left under the text `prefix`, if nothing was added to it for
        so long; answers how many. Safe at any age: a write that is still under way begins again.
        """
        ...


def open_store(url: str | Path) -> Store:
    """The store of a URL. Supported now: an absolute path and file:///path (local disk, NFS). Touches nothing.

    Raises OptionsError for relative paths and other schemes.
    """
    text = str(url)
    if "://" not in text:
        return FileStore(text)
    parts = urlsplit(text)
    if parts.scheme != "file":
        raise OptionsError(
            f"store {text!r}: this version reads and writes stores of the kinds /absolute/path and file:///path, not "
            f"{parts.scheme}://. Nothing was touched; give a path that every node mounts.",
            store=text,
        )
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise OptionsError(
            f"store {text!r}: a file URL has three slashes and a path, as in file:///mnt/ckpts. Nothing was touched.",
            store=text,
        )
    return FileStore(unquote(parts.path))


def store_error(action: str, path: Path, error: OSError) -> StoreError:
    """The store's failure for an error of the operating system: unreachable (outcome unknown) or refused."""
    code = errno.errorcode.get(error.errno, "?") if error.errno is not None else "?"
    what = f"the store could not {action} {path}: {error.strerror or error} [{code}]"
    facts = {"path": str(path), "errno": error.errno}
    if error.errno in _UNREACHABLE:
        return StoreUnavailableError(
            f"{what}. Whether it happened is unknown; what is committed locally stays and is uploaded later; look at "
            "the mount.",
            **facts,
        )
    if error.errno in files.FULL:
        facts["free_bytes"] = files.free_bytes(path)
    return StoreError(f"{what}. No object was harmed; {files.os_advice(error)}.", **facts)


class FileStore:
    """A store in a directory: local disk or NFS. Exclusive create by link; replacing is atomic but not conditional."""

    def __init__(self, root: str | Path) -> None:
        """Raises OptionsError unless `root` is an absolute path. Touches nothing."""
        text = str(root)
        if not text.startswith("/") or "\0" in text:
            raise OptionsError(
                f"store {text!r} is not an absolute path: every process would take it for another place. Nothing was "
                "touched; give a path that begins with / and that every node mounts.",
                store=text,
            )
        self.root = Path(text)
        self._durable_folders: set[tuple[int, int]] = set()  # see files.make_dirs_durably

    def __repr__(self) -> str:
        return f"FileStore({str(self.root)!r})"

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def guarantees(self) -> Guarantees:
        return Guarantees(
            exclusive_create=True,
            conditional_replace=False,
            sentence=f"{self.root} is a file system: objects are created exclusively by link, replaced whole but not "
            "conditionally, so latest.json is a hint and readers go by the COMPLETED files",
        )

    def place(self, key: str) -> Path:
        """The file of a key. Raises IntegrityError when it would leave the root."""
        return confine(self.root, key)

    def probe(self, folder: str) -> None:
        key = f"{folder}/{new_id('.lastgood-probe')}{files.TEMPORARY_SUFFIX}"  # swept, if a death leaves it
        self._require_root()
        try:
            if not self.create_exclusive(key, b"first") or self.create_exclusive(key, b"second"):
                raise StoreError(
                    f"{self.root} does not create files exclusively: of two writers of one name both won or both lost. "
                    "Nothing was saved there; use a file system with hard links (ext4, xfs, NFS).",
                    path=str(self.root),
                )
            if self.get(key) != b"first":
                raise StoreError(
                    f"{self.root} does not give back what was written. Nothing was saved there; look at the mount.",
                    path=str(self.root),
                )
        finally:
            self.delete_many([key])

    def _require_root(self) -> None:
        """A store is never made by itself: where a file system should be mounted it would lie on this host's disk."""
        try:
            found = self.root.stat()
        except FileNotFoundError as error:
            raise StoreError(
                f"the store {self.root} does not exist on {socket.gethostname()}. Nothing was touched, and it is not "
                "made by itself: if a file system should be mounted there, checkpoints would go to this host's own "
                f"disk. Mount it; for a new store: mkdir -p {self.root}",
                path=str(self.root),
                errno=error.errno,
            ) from error
        except OSError as error:
            raise store_error("look at", self.root, error) from error
        if not stat.S_ISDIR(found.st_mode):
            raise StoreError(
                f"the store {self.root} is no directory. Nothing was touched; give one that every node mounts.",
                path=str(self.root),
                errno=errno.ENOTDIR,
            )

    def create_exclusive(self, key: str, data: bytes) -> bool:
        path = self.place(key)
        return self._in_folder(path, lambda: files.create_once(path, data, store_error))

    def replace(self, key: str, data: bytes) -> None:
        path = self.place(key)
        self._in_folder(path, lambda: files.replace_durably(path, data, store_error))

    def replace_if(self, key: str, data: bytes, etag: str | None) -> bool:
        # Between the look and the rename another process may replace it too: guarantees say so.
        standing = self.head(key)
        if etag is None:
            return standing is None and self.create_exclusive(key, data)
        if standing is None or standing[1] != etag:
            return False
        self.replace(key, data)
        return True

    def put_file(self, key: str, path: Path, digests: BlockDigests, same_as: str | None = None) -> None:
        target = self.place(key)
        if not self._stands(key, target, digests):
            if same_as is None or not self._in_folder(target, lambda: self._link(same_as, target, digests)):
                self._in_folder(target, lambda: self._put(key, target, path, digests))
            return
        with files.translated("sync", target, store_error):
            files.fsync_dir(target.parent)  # whoever put it there may have died before its name was durable

    def _link(self, same_as: str, target: Path, digests: BlockDigests) -> bool:
        """Gives the object at `same_as` a second name if it holds these bytes, and every one is read. Else False."""
        source = self.place(same_as)
        try:
            return self._stands(same_as, source, digests) and files.link_into_place(source, target)
        except (LastgoodError, OSError):
            return False  # it has rotted, or cannot be read or linked: the copy tells what is wrong with the store

    def _put(self, key: str, target: Path, path: Path, digests: BlockDigests) -> None:
        temporary = files.temporary_beside(target)
        try:
            self._copy(path, temporary, digests)
            failpoint("storage.put_file.before_link")
            with files.translated("create", target, store_error):
                won = files.link_into_place(temporary, target)
            if not won and not self._stands(key, target, digests):
                raise StoreUnavailableError(
                    f"{target} was there and is gone again. Somebody deletes in this store; upload again.",
                    path=str(target),
                )
        finally:
            files.remove_quietly(temporary)

    def _stands(self, key: str, target: Path, digests: BlockDigests) -> bool:
        """Whether these bytes stand at the key; False when nothing does. Raises AlreadyExistsError for other bytes."""
        with files.translated("read", target, store_error):
            try:
                fd = files.open_regular(target)
            except FileNotFoundError:
                return False
            try:
                nbytes = os.fstat(fd).st_size
                same = nbytes == digests.nbytes and (
                    files.digest_file(fd, nbytes, digests.block_bytes).digest == digests.digest
                )
            finally:
                os.close(fd)
        if not same:
            raise AlreadyExistsError(
                f"other bytes stand at {key} in {self.root} ({nbytes} bytes; {digests.nbytes} were to be stored). They "
                "were left as they are; run `lastgood verify` on that checkpoint.",
                path=str(target),
                key=key,
            )
        return True

    def _copy(self, path: Path, temporary: Path, digests: BlockDigests) -> None:
        with files.translated("read", path, store_error):
            try:
                source = files.open_regular(path)
            except FileNotFoundError as error:
                raise _not_as_recorded(path, "it is missing") from error
        try:
            with files.translated("write", temporary, store_error):
                target = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                try:
                    self._copy_blocks(source, target, path, digests)
                    os.fsync(target)
                    os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)  # read back from the disk, not from memory
                finally:
                    os.close(target)
        finally:
            os.close(source)
        with files.translated("read back", temporary, store_error):
            target = files.open_regular(temporary)
            try:
                landed = files.digest_file(target, digests.nbytes, digests.block_bytes)
                longer = os.fstat(target).st_size != digests.nbytes
            finally:
                os.close(target)
        if longer or landed.digest != digests.digest:
            raise StoreError(
                f"{temporary} does not read back as it was written (blocks {digests.wrong_blocks(landed)[:5]}). The "
                "copy was removed, the local file is intact; look at the store's disk.",
                path=str(temporary),
            )

    def _copy_blocks(self, source: int, target: int, path: Path, digests: BlockDigests) -> None:
        running, at = RunningDigest(digests.block_bytes), 0
        scratch = memoryview(bytearray(min(files.WRITE_BYTES, max(1, digests.nbytes + 1))))
        while True:
            count = files.read_range_into(source, scratch, at)
            if count == 0:
                break
            if at + count > digests.nbytes:
                raise _not_as_recorded(path, f"it is longer than {digests.nbytes} bytes")
            running.update(scratch[:count])
            files.write_all(target, scratch[:count], at)
            if at == 0:
                failpoint("storage.put_file.middle")
            at += count
        if at != digests.nbytes:
            raise _not_as_recorded(path, f"it has {at} of {digests.nbytes} bytes")
        found = running.result()
        if found.digest != digests.digest:
            raise _not_as_recorded(path, f"blocks {digests.wrong_blocks(found)[:5]} differ")

    def get(self, key: str) -> bytes:
        data = self.find(key)
        if data is None:
            raise StoreError(
                f"there is no object {key} in {self.root}. Nothing was changed; look at the store's content with "
                "`lastgood verify`.",
                key=key,
                path=str(self.place(key)),
                missing=True,
            )
        return data

    def find(self, key: str) -> bytes | None:
        path = self.place(key)
        with files.translated("read", path, store_error):
            try:
                return files.read_regular(path)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        path = self.place(key)
        target = bytearray(end - begin)
        with files.translated("read", path, store_error):
            fd = files.open_regular(path)
            try:
                count = files.read_range_into(fd, memoryview(target), begin)
            finally:
                os.close(fd)
        if count != len(target):
            raise IntegrityError(
                f"{path} ends at byte {begin + count}, and bytes {begin} to {end} were asked for. It is not whole; "
                "take this checkpoint from another copy, or an earlier one.",
                path=str(path),
            )
        return bytes(target)

    def list(self, prefix: str) -> Sequence[str]:
        keys, _ = self._below(prefix)
        return sorted(key for key in keys if not files.is_temporary(key.rpartition("/")[2]))

    def sweep(self, prefix: str, older_than_s: float) -> int:
        keys, folders = self._below(prefix)
        unfinished = [self.root / key for key in keys if files.is_temporary(key.rpartition("/")[2])]
        swept = sum(_remove_if_old(place, older_than_s, Path.unlink) for place in unfinished)
        for folder in reversed(folders):  # those inside first
            _remove_if_old(self.root / folder, older_than_s, Path.rmdir)
        return swept

    def _below(self, prefix: str) -> tuple[builtins.list[str], builtins.list[str]]:
        """Keys that begin with a text, those of unfinished writes too, and the directories that do, outer ones first.

        Raises StoreError.
        """
        folder = prefix.rpartition("/")[0]
        top = self.place(check_relative(folder)) if folder else self.root
        keys: builtins.list[str] = []
        inside: builtins.list[str] = []
        folders = [top]
        with files.translated("list", top, store_error):
            while folders:
                found = folders.pop()
                try:
                    with os.scandir(found) as listing:
                        entries = [*listing]
                except (FileNotFoundError, NotADirectoryError):
                    continue  # gone meanwhile, or never there
                for entry in entries:
                    key = str(Path(entry.path).relative_to(self.root))
                    if entry.is_dir(follow_symlinks=False):
                        if key.startswith(prefix):
                            inside.append(key)
                        if key.startswith(prefix) or prefix.startswith(key + "/"):
                            folders.append(Path(entry.path))
                    elif key.startswith(prefix) and entry.is_file(follow_symlinks=False):
                        keys.append(key)
        return keys, inside

    def head(self, key: str) -> tuple[int, str] | None:
        path = self.place(key)
        with files.translated("read", path, store_error):
            try:
                fd = files.open_regular(path)  # opening, unlike stat, asks an NFS server again
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                status = os.fstat(fd)
            finally:
                os.close(fd)
        return status.st_size, f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"

    def delete_many(self, keys: Iterable[str]) -> None:
        stayed: dict[str, str] = {}
        for key in keys:
            path = self.place(key)
            try:
                path.unlink(missing_ok=True)
                self._prune(path.parent)
            except OSError as error:
                stayed[key] = str(error)
        if stayed:
            raise StoreError(
                f"{len(stayed)} objects could not be deleted from {self.root}: "
                + "; ".join(f"{key} ({why})" for key, why in list(stayed.items())[:3])
                + ". They were left; deleting again is safe.",
                path=str(self.root),
                keys=sorted(stayed),
            )

    def _prune(self, folder: Path) -> None:
        """Removes directories that became empty, up to the root (object stores have none, so keys leave no trace)."""
        while folder != self.root and folder.is_relative_to(self.root):
            try:
                folder.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return
                raise
            folder = folder.parent

    def _in_folder(self, path: Path, write: Callable[[], T]) -> T:
        """Runs `write` with the file's directory in place, again if a deletion or a sweep elsewhere took it away."""
        for last in (False, False, True):
            try:
                files.make_dirs_durably(path.parent, store_error, self._durable_folders)
                return write()
            except StoreError as error:
                if last or error.facts.get("errno") != errno.ENOENT:
                    raise
        raise AssertionError("unreachable")


def _remove_if_old(place: Path, older_than_s: float, remove: Callable[[Path], None]) -> bool:
    """Removes a file or an empty directory that has not changed for so long; answers whether it is gone by this.

    Raises StoreError.
    """
    with files.translated("sweep", place, store_error):
        try:
            if time.time() - place.lstat().st_mtime >= older_than_s:
                remove(place)
                return True
        except FileNotFoundError:
            pass  # its writer lives, and was done
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        return False


def _not_as_recorded(path: Path, why: str) -> IntegrityError:
    return IntegrityError(
        f"{path} is not what was staged: {why}. Nothing appeared in the store; the checkpoint must be repaired from "
        "another copy, or an earlier one used.",
        path=str(path),
    )
