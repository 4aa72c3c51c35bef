"""A disk as a power loss sees it: what was written, what was made durable, and every image that may be left.

The rules, which are those of POSIX and not kinder ones of some file system: a file's bytes are durable after fsync of
the file; a name is durable after fsync of the directory that holds it; everything else may be there or not after a
power loss, each change for itself. A rename is one change. fsync of a file does not save its name, fsync of a
directory does not save the content of what it names.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lastgood.storage.files import is_temporary
from tests.crash.operations import Operation

Tree = dict[str, bytes | None]  # path -> content; None: a directory
Key = frozenset[tuple[str, bytes | None]]
Trees = Mapping[str, Tree]  # by disk


@dataclass
class File:
    """`safe`: what a power loss cannot take."""

    now: bytes = b""
    safe: bytes = b""


class Change(NamedTuple):
    """One change of a directory that no fsync has saved: these names go, then that one appears."""

    number: int  # of the operation
    gone: tuple[str, ...]
    name: str | None
    node: File | Folder | None
    what: str  # for people

    def apply(self, names: dict[str, File | Folder]) -> None:
        for name in self.gone:
            names.pop(name, None)
        if self.name is not None and self.node is not None:
            names[self.name] = self.node


@dataclass
class Folder:
    now: dict[str, File | Folder] = field(default_factory=dict)
    safe: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)


class Image(NamedTuple):
    """What a power loss may leave of one disk, and in words what it took."""

    tree: Tree
    story: str


DATA_FATES = ("lost", "zeros", "garbage", "half")  # of bytes that no fsync has saved; or "kept"


class Disk:
    """The model of one disk. Starts as a durable tree; `apply` every operation in its order."""

    def __init__(self, tree: Tree) -> None:
        self.root = Folder()
        self._operations = 0
        for path in sorted(tree):
            parent, name = self._parent(path)
            content = tree[path]
            parent.now[name] = Folder() if content is None else File(content, content)
        for node in self._nodes():
            if isinstance(node, Folder):
                node.safe = dict(node.now)

    # -- what happens

    def apply(self, operation: Operation) -> None:
        """Raises KeyError or AssertionError when the operation is not one of those that the model knows."""
        self._operations += 1
        kind, path = operation.kind, operation.path
        if kind in ("write", "allocate", "truncate"):
            file = self._find(path)
            assert isinstance(file, File), f"{operation}: not a file"
            file.now = _changed(file.now, operation)
        elif kind == "fsync":
            self._fsync(self._find(path))
        elif kind == "create":
            self._change(operation, path, (), File())
        elif kind == "mkdir":
            self._change(operation, path, (), Folder())
        elif kind in ("unlink", "rmdir"):
            self._change(operation, path, (self._parent(path)[1],), None)
        elif kind in ("link", "rename"):
            parent, name = self._parent(path)
            target, _ = self._parent(operation.other)
            assert target is parent, f"{operation}: the product moves within one directory only"
            self._change(operation, operation.other, (name,) if kind == "rename" else (), parent.now[name])
        else:
            raise AssertionError(f"the model does not know {operation}")

    def _change(self, operation: Operation, path: str, gone: tuple[str, ...], node: File | Folder | None) -> None:
        parent, name = self._parent(path)
        change = Change(self._operations, gone, None if node is None else name, node, str(operation))
        change.apply(parent.now)
        parent.pending.append(change)

    @staticmethod
    def _fsync(node: File | Folder) -> None:
        if isinstance(node, File):
            node.safe = node.now
        else:
            node.safe = dict(node.now)
            node.pending.clear()

    # -- what is there

    def kept(self) -> Tree:
        """What running programs see, and what a kill leaves."""
        return _walk(self.root, "", {}, None, {})

    def lost(self) -> Tree:
        """What is left when a power loss takes everything that was not made durable."""
        return _walk(self.root, "", {}, frozenset(), {id(file): file.safe for file in self._dirty()})

    def images(self, seed: int, samples: int = 2) -> Iterator[Image]:
        """What a power loss now may leave: all lost, all kept, each change alone lost or alone kept, data in every
        fate, and `samples` random mixtures."""
        changes = sorted(
            (change for node in self._nodes() if isinstance(node, Folder) for change in node.pending),
            key=lambda change: change.number,
        )
        dirty = self._dirty()
        everything = {change.number for change in changes}
        fates = DATA_FATES if dirty else ()
        yield Image(self.lost(), "everything unsynced is lost")
        yield Image(self.kept(), "everything is kept")
        for fate in fates:
            yield self._image(everything, dirty, [fate], f"all names kept, data {fate}")
        for change in changes:
            yield self._image(everything - {change.number}, dirty, ["kept"], f"lost: {change.what}")
            yield self._image({change.number}, dirty, ["lost"], f"kept alone: {change.what}, data lost")
        draw = random.Random(seed)
        for _ in range(samples if changes or dirty else 0):
            kept = {number for number in everything if draw.random() < 0.5}
            picked = [draw.choice((*DATA_FATES, "kept")) for _ in dirty]
            lost = [change.what for change in changes if change.number not in kept]
            yield self._image(kept, dirty, picked, f"lost: {'; '.join(lost) or 'no name'}; data {picked}")

    def _image(self, kept: Collection[int], dirty: list[File], fates: list[str], story: str) -> Image:
        content = {id(file): _left(file, fates[i % len(fates)]) for i, file in enumerate(dirty)}
        return Image(_walk(self.root, "", {}, kept, content), story)

    # -- finding

    def _find(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for name in path.split("/") if path else ():
            assert isinstance(node, Folder), path
            node = node.now[name]
        return node

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder, _, name = path.rpartition("/")
        parent = self._find(folder)
        assert isinstance(parent, Folder), path
        return parent, name

    def _nodes(self) -> list[File | Folder]:
        """Everything that a name leads to, now or in some image."""
        found: dict[int, File | Folder] = {}
        todo: list[File | Folder] = [self.root]
        while todo:
            node = todo.pop()
            if id(node) in found:
                continue
            found[id(node)] = node
            if isinstance(node, Folder):
                todo += [*node.now.values(), *node.safe.values()]
                todo += [change.node for change in node.pending if change.node is not None]
        return list(found.values())

    def _dirty(self) -> list[File]:
        return [node for node in self._nodes() if isinstance(node, File) and node.now != node.safe]


class Disks:
    """Several disks. An operation's path begins with the name of its disk."""

    def __init__(self, tree: Tree) -> None:
        names = [path for path in tree if "/" not in path]
        self.of = {name: Disk(_below(tree, name)) for name in names}

    def apply(self, operation: Operation) -> str:
        """Answers which disk it was on."""
        name, _, path = operation.path.partition("/")
        other = operation.other.partition("/")[2]
        self.of[name].apply(Operation(operation.kind, path, other, operation.at, operation.data, operation.size))
        return name

    def kept(self) -> dict[str, Tree]:
        return {name: disk.kept() for name, disk in self.of.items()}

    def lost(self) -> dict[str, Tree]:
        return {name: disk.lost() for name, disk in self.of.items()}


def _below(tree: Tree, folder: str) -> Tree:
    return {path[len(folder) + 1 :]: content for path, content in tree.items() if path.startswith(folder + "/")}


def split(tree: Tree) -> dict[str, Tree]:
    """One tree per disk: its first level."""
    return {name: _below(tree, name) for name in tree if "/" not in name}


def joined(trees: Trees) -> Tree:
    """One tree over all disks, for write_tree."""
    whole: Tree = dict.fromkeys(trees)
    for name, tree in trees.items():
        whole.update({f"{name}/{path}": content for path, content in tree.items()})
    return whole


def key(tree: Tree) -> Key:
    """Equal for trees that mean the same: whose unfinished file of a write lies where is not told apart."""
    named = ((path.rpartition("/"), content) for path, content in tree.items())
    return frozenset(
        (f"{folder}/.tmp", b"") if is_temporary(name) else (f"{folder}/{name}", content)
        for (folder, _, name), content in named
    )


def _walk(folder: Folder, prefix: str, into: Tree, kept: Collection[int] | None, content: Mapping[int, bytes]) -> Tree:
    """The tree below a folder; `kept`: the unsynced changes that count (None: all), `content`: of unsynced files."""
    names = folder.now
    if kept is not None and folder.pending:
        names = dict(folder.safe)
        for change in folder.pending:
            if change.number in kept:
                change.apply(names)
    for name, node in names.items():
        path = f"{prefix}{name}"
        if isinstance(node, File):
            into[path] = content.get(id(node), node.now)
        else:
            into[path] = None
            _walk(node, f"{path}/", into, kept, content)
    return into


def _changed(content: bytes, operation: Operation) -> bytes:
    if operation.kind == "truncate":
        return content[: operation.size].ljust(operation.size, b"\0")
    if operation.kind == "allocate":
        return content.ljust(operation.size, b"\0")
    end = operation.at + len(operation.data)
    return content[: operation.at].ljust(operation.at, b"\0") + operation.data + content[end:]


def _left(file: File, fate: str) -> bytes:
    """What a power loss leaves of a file's bytes."""
    if fate == "lost":
        return file.safe
    if fate == "zeros":
        return bytes(len(file.now))
    if fate == "garbage":
        return (b"\xa5\x5a\x00\xff" * (len(file.now) // 4 + 1))[: len(file.now)]
    if fate == "half":
        return file.now[: len(file.now) // 2]
    return file.now


def read_tree(root: Path) -> Tree:
    """What truly lies below a directory. (Plain calls of the system: this is done thousands of times.)"""
    found: Tree = {}
    at = len(str(root)) + 1
    for folder, folders, names in os.walk(root):
        inside = f"{folder}/"[at:]
        found.update({f"{inside}{name}": None for name in folders})
        for name in names:
            fd = os.open(f"{folder}/{name}", os.O_RDONLY)
            found[f"{inside}{name}"] = os.read(fd, os.fstat(fd).st_size)
            os.close(fd)
    return found


def write_tree(root: Path, tree: Tree) -> None:
    """Lays a tree out below a directory, which must be there and empty."""
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            os.mkdir(f"{root}/{path}")  # noqa: PTH102 - as above
        else:
            fd = os.open(f"{root}/{path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.write(fd, content)
            os.close(fd)
