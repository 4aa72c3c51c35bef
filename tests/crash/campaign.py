"""The campaign: every chapter of the story is killed at every operation, and loses its power after every operation.

For each chapter: it is told once to its end, and recorded. Then
- kills: a child tells it again and kills itself after operation k (of a write, also in its middle); what lies on the
  disks must be what the model says; then everything starts again;
- power losses: for the disks as they were after operation k, images of what may be left are judged;
- going on: after a kill the same coordinator goes on with restarted stagers; then the power is lost.
"""

from __future__ import annotations

import copy
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.children import Heard, Telling, tell
from tests.crash.cluster import Place, make_disks
from tests.crash.disk_model import Disks, Tree, joined, key, read_tree, split, write_tree
from tests.crash.journal import Mark, known_after
from tests.crash.judge import Broken, Judge, hold
from tests.crash.operations import Operation
from tests.crash.recovery import recover
from tests.crash.standing import Standing
from tests.crash.story import CHAPTERS

NAMES = ("link", "rename", "mkdir")  # after one of these, a name is seen that a power loss may take


class Found(Exception):  # noqa: N818 - it is what a planted bug is for
    """The sentence that the campaign was to look for."""


@dataclass
class Tally:
    """What a campaign came to."""

    operations: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    gone_on: int = 0
    images: int = 0
    recoveries: int = 0
    disks: int = 0
    cpu_s: float = 0.0
    broken: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.operations.most_common())
        return (
            f"{self.operations.total()} operations ({kinds}); "
            f"{self.kills} kills, {self.images} images of power losses "
            f"({self.disks} different disks), {self.gone_on} runs that went on after a kill and lost power later, "
            f"{self.recoveries} recoveries by a coordinator; "
            f"{len(self.broken)} broken promises; {self.cpu_s:.0f} s of one core"
        )


@dataclass(frozen=True)
class Recorded:
    """A chapter that was told to its end, on disks that began as `start`."""

    chapter: str
    start: Tree
    operations: list[Operation]
    marks: list[Mark]
    heard: Heard
    standing: Standing


class Campaign:
    """`folder`: an empty directory of its own, best in memory. `every`: after one of so many kills, and one of five
    times so many power losses, a coordinator recovers; 1: also every kill goes on, not only those at which a name is
    not yet durable. `samples`: random images per operation. `plant`: a planted bug. `until`: a part of the sentence at
    which the campaign ends with Found."""

    def __init__(
        self, folder: Path, *, every: int = 10, samples: int = 2, plant: str | None = None, until: str | None = None
    ) -> None:
        self._folder = folder
        self._every = every
        self._samples = samples
        self._plant = plant
        self._until = until
        for name in ("images", "judge"):
            (folder / name).mkdir()
        self.judge = Judge(folder / "judge")
        self.tally = Tally()

    # -- recording

    def record(self) -> Iterator[Recorded]:
        """Tells the chapters one after the other. Raises Broken when the layer does not see everything."""
        make_disks(self._folder / "first")
        start = read_tree(self._folder / "first")
        shutil.rmtree(self._folder / "first")
        for number, chapter in enumerate(CHAPTERS, 1):
            with self._place(start) as place:
                heard = tell(Telling(chapter, number, plant=self._plant), place)
                end = read_tree(place.root)
            if heard.trouble is not None:
                raise Broken(f"{chapter}: {heard.trouble}")
            disks = Disks(start)
            for operation in heard.operations:
                disks.apply(operation)
            if joined(disks.kept()) != end:
                raise Broken(f"{chapter}: the layer has not seen everything: {_difference(joined(disks.kept()), end)}")
            self.tally.operations.update(operation.kind for operation in heard.operations)
            standing = Standing(split(start), self.judge.look(split(start)))
            yield Recorded(chapter, start, heard.operations, heard.marks, heard, standing)
            start = end

    # -- kills

    def kill(self, chapter: Recorded, number: int, at: Callable[[Operation], bool] = lambda operation: True) -> None:
        """Kills the chapter at every operation, or at those only."""
        disks = Disks(chapter.start)
        for done, operation in enumerate(chapter.operations, 1):
            if operation.kind == "write" and at(operation):
                halved = copy.deepcopy(disks)
                halved.apply(_half(operation))
                self._kill(chapter, number, done, halved.kept(), half=True)
            disks.apply(operation)
            if at(operation):
                self._kill(chapter, number, done, disks.kept(), half=False)

    def _kill(self, chapter: Recorded, number: int, done: int, expected: dict[str, Tree], *, half: bool) -> None:
        where = f"{chapter.chapter}, killed {'within' if half else 'after'} operation {done} ({_name(chapter, done)})"
        with self._place(chapter.start) as place, self._judged(where):
            heard = tell(Telling(chapter.chapter, number, kill_after=done, half=half, plant=self._plant), place)
            if not heard.killed:
                raise Broken(f"the child was not killed: {heard.trouble}")
            trees = split(read_tree(place.root))
            if trees != expected:
                raise Broken(f"the model is wrong: {_difference(joined(expected), joined(trees))}")
            self.tally.kills += 1
            views = self.judge.look(trees)
            hold(trees, heard.marks)
            chapter.standing.hold(trees, views, heard.marks)
            if (self.tally.kills + number) % self._every == 0:
                recover(place, self.judge, views)
                self.tally.recoveries += 1

    # -- power losses

    def lose_power(self, chapter: Recorded) -> None:
        """Takes the power after every operation."""
        disks, seen = Disks(chapter.start), set()
        keys = {name: key(tree) for name, tree in disks.kept().items()}
        for done, operation in enumerate(chapter.operations, 1):
            touched = disks.apply(operation)
            marks = known_after(chapter.marks, done)
            kept, lost = disks.kept(), disks.lost()
            for image in disks.of[touched].images(done, self._samples):
                mine = key(image.tree)
                for others, how in ((kept, "kept"), (lost, "lost")):
                    trees = {**others, touched: image.tree}
                    at = (mine, how, tuple(key(trees[name]) for name in keys if name != touched), len(marks))
                    if at not in seen:
                        seen.add(at)
                        self._lose(chapter, done, trees, marks, f"{image.story}; other disks {how}")

    def _lose(self, chapter: Recorded, done: int, trees: dict[str, Tree], marks: list[Mark], story: str) -> None:
        where = f"{chapter.chapter}, power lost after operation {done} ({_name(chapter, done)}; {story})"
        with self._judged(where):
            self.tally.images += 1
            views = self.judge.look(trees)
            hold(trees, marks)
            chapter.standing.hold(trees, views, marks)
            if self.tally.images % (5 * self._every) == 0:
                with self._place(joined(trees)) as place:
                    recover(place, self.judge, views)
                self.tally.recoveries += 1

    # -- a kill, going on, then a power loss

    def go_on(self, chapter: Recorded, number: int) -> None:
        """Kills the chapter, lets it go on with what it sees, and takes the power after each call that returns."""
        disks = Disks(chapter.start)
        for done, operation in enumerate(chapter.operations, 1):
            disks.apply(operation)
            if operation.kind in NAMES or self._every == 1:
                self._go_on(chapter, number, done, copy.deepcopy(disks))

    def _go_on(self, chapter: Recorded, number: int, done: int, disks: Disks) -> None:
        where = f"{chapter.chapter}, killed after operation {done} ({_name(chapter, done)}), gone on"
        with self._place(joined(disks.kept())) as place, self._judged(where) as judged:
            heard = tell(Telling(chapter.chapter, 100 + number, again=True, plant=self._plant), place)
            if heard.trouble is not None:
                raise Broken(f"it cannot go on: {heard.trouble}")
            self.tally.gone_on += 1
            before = known_after(chapter.marks, done)
            ends = {mark.at for mark in heard.marks if mark.ended}
            for at in range(len(heard.operations) + 1):
                if at:
                    disks.apply(heard.operations[at - 1])
                if at in ends:
                    judged.append(f"power lost after its operation {at}")
                    trees = disks.lost()
                    views, marks = self.judge.look(trees), [*before, *known_after(heard.marks, at)]
                    hold(trees, marks)
                    chapter.standing.hold(trees, views, marks)
                    self.tally.images += 1
            if joined(disks.kept()) != read_tree(place.root):
                raise Broken("the layer has not seen everything")

    # -- helpers

    def run(self) -> Tally:
        """Everything, chapter by chapter. A chapter's power losses come first: they are quick."""
        began = _cpu_s()
        for number, chapter in enumerate(self.record(), 1):
            self.lose_power(chapter)
            self.go_on(chapter, number)
            self.kill(chapter, number)
        self.tally.disks = self.judge.disks_seen
        self.tally.cpu_s = _cpu_s() - began
        return self.tally

    def _place(self, tree: Tree) -> Fresh:
        return Fresh(self._folder / "disks", self._folder / "images", tree)

    def _judged(self, where: str) -> _Judged:
        return _Judged(where, self.tally, self._until)


class Fresh:
    """Disks with this tree on them, for the time of a with block."""

    def __init__(self, root: Path, images: Path, tree: Tree) -> None:
        self._place, self._tree = Place(root, images), tree

    def __enter__(self) -> Place:
        self._place.root.mkdir()
        write_tree(self._place.root, self._tree)
        return self._place

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._place.root)


class _Judged:
    """Notes a broken promise with where it happened."""

    def __init__(self, where: str, tally: Tally, until: str | None) -> None:
        self._where, self._tally, self._until = where, tally, until
        self._then: list[str] = []

    def __enter__(self) -> list[str]:
        return self._then

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        what = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        self._tally.broken.append(f"{', '.join([self._where, *self._then[-1:]])}: {what}")
        if self._until is not None and self._until in what:
            raise Found(self._tally.broken[-1])
        return True


def _cpu_s() -> float:
    """Seconds of a core that this process and its children took."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _half(operation: Operation) -> Operation:
    data = operation.data[: len(operation.data) // 2]
    return Operation(operation.kind, operation.path, at=operation.at, data=data)


def _name(chapter: Recorded, done: int) -> str:
    return str(chapter.operations[done - 1])


def _difference(left: Tree, right: Tree) -> str:
    wrong = sorted(path for path in left.keys() | right.keys() if left.get(path, 0) != right.get(path, 0))
    return ", ".join(wrong[:5])
