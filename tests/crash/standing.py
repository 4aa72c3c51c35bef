"""What stood before a chapter stands after its crash, and pointers lead to whole commits and never back.

A step may have two commits: saved, rewound, saved again. Both stand until retention lets one go; its pointer leads to
one of them at every moment, and to the newer one once everything has started again.
"""

from __future__ import annotations

from collections.abc import Mapping

from lastgood.storage.layout import COMPLETED
from lastgood.storage.manifest import Completed, Head, Latest, Tombstone
from tests.crash.cluster import PATHS
from tests.crash.disk_model import Trees
from tests.crash.journal import Mark
from tests.crash.judge import STORE, Broken, Root, Told, View


def pointers(root: Root) -> dict[str, Completed | Latest]:
    """The pointers of all steps, and latest.json, by their places below the root. Raises Broken for a torn one."""
    found: dict[str, Completed | Latest | None] = {PATHS.latest: root.read(Latest, PATHS.latest)}
    for path in root.tree:
        at = path.partition("/")[2]
        if at.count("/") == 2 and at.endswith(f"/{COMPLETED}"):
            found[at] = root.read(Completed, at)
    return {at: pointer for at, pointer in found.items() if pointer is not None}


def order(head: Completed | Latest | Head) -> tuple[int, int]:
    return head.epoch, head.sequence


def lead_to_commits(root: Root, view: View) -> dict[str, Completed | Latest]:
    """The pointers of a disk. Raises Broken when one does not lead to a whole commit (or one being collected) there."""
    found = pointers(root)
    for at, pointer in found.items():
        step = pointer.step if isinstance(pointer, Completed) else pointer.global_step
        standing = root.completed(
            Head(attempt=pointer.attempt, step=step, epoch=pointer.epoch, sequence=pointer.sequence)
        )
        if isinstance(standing, Tombstone):
            continue
        if pointer.attempt not in view.committed:
            raise Broken(f"{root.name}: {at} leads to {pointer.attempt}, which is no commit there")
        if isinstance(pointer, Completed) and pointer != standing:
            raise Broken(f"{root.name}: {at} is not what stands as COMPLETED of {pointer.attempt}")
    return found


class Standing:
    """What stood when a chapter began."""

    def __init__(self, trees: Trees, views: Mapping[str, View]) -> None:
        self.committed = {name: frozenset(view.committed) for name, view in views.items()}
        self.pointers = {name: lead_to_commits(Root(name, tree), views[name]) for name, tree in trees.items()}

    def hold(self, trees: Trees, views: Mapping[str, View], marks: list[Mark]) -> None:
        """Raises Broken when some of it is gone that nobody has begun to collect, or a pointer leads astray or back."""
        told = Told(marks)
        for name, tree in trees.items():
            now = lead_to_commits(Root(name, tree), views[name])
            gone = {one for one in self.committed[name] - views[name].committed.keys() if not _goes(told, one, name)}
            if gone:
                raise Broken(f"{name}: {sorted(gone)} was committed before, and is no whole checkpoint any more")
            for at, before in self.pointers[name].items():
                if at not in now and not _goes(told, before.attempt, name):
                    raise Broken(f"{name}: {at} led to {before.attempt}, and is gone")
                if at in now and order(now[at]) < order(before):
                    raise Broken(f"{name}: {at} led to {before.attempt}, and leads back to {now[at].attempt}")


def _goes(told: Told, attempt: str, name: str) -> bool:
    return told.begun("collect remotely", attempt) if name == STORE else told.going(attempt, name)


def lead_to_the_newest(trees: Trees, views: Mapping[str, View]) -> None:
    """Raises Broken unless every pointer leads to the newest commit that it may lead to, as after a recovery."""
    for name, tree in trees.items():
        now = lead_to_commits(Root(name, tree), views[name])
        owed: dict[str, Head] = {}
        for head in sorted(views[name].committed.values(), key=order):
            owed[PATHS.pointer(head.step)] = owed[PATHS.latest] = head
        for at, head in owed.items():
            if at not in now or now[at].attempt != head.attempt:
                leads = f"leads to {now[at].attempt}" if at in now else "is not there"
                raise Broken(f"{name}: {at} {leads} after the recovery, and {head.attempt} is the newest")
