"""Every operation of a save fails once, with every error: what people are told, and what is left, is judged here.

The disks hold a durable checkpoint. A save meets the error (failing_run.py); the next one, by the same processes, does
not; then everything starts again. The save may be lost or committed, and nothing else may be.
"""

from __future__ import annotations

import errno
import itertools
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from lastgood.coordinator.messages import SaveState
from lastgood.storage.direct import PAGE_BYTES
from lastgood.storage.errors import LastgoodError
from lastgood.storage.files import is_temporary
from tests.crash.campaign import Fresh
from tests.crash.cluster import PATHS, Place, make_disks
from tests.crash.disk_model import Tree, read_tree, split
from tests.crash.failing_run import AFTER, BEFORE, FAULTY, Came, Fault, Saved, run
from tests.crash.judge import STORE, Broken, Judge
from tests.crash.operations import Operation
from tests.crash.recovery import recover

ERRNOS = (errno.ENOSPC, errno.EIO)
HOWS = ("not done", "half done", "done")  # what the operation that fails has done by then
COMES_FIRST = ("Snapshot", "Stage", "Accept")  # calls without which there is no commit


class Errors:
    """Every operation of a save, and every error that it may answer with. `folder`: an empty directory of its own."""

    def __init__(self, folder: Path, *, plant: str | None = None) -> None:
        self._folder, self._plant = folder, plant
        for name in ("images", "judge"):
            (folder / name).mkdir()
        self.judge = Judge(folder / "judge")
        self.outcomes: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self._start = self._first_save()
        with self._disks() as place:
            came = run(place, None, (FAULTY, AFTER))
            self._names = came.names
            self.operations = came.seen
            self.judge.look(split(read_tree(place.root)))

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.fired.most_common())
        fates = ", ".join(f"{count} {fate}" for fate, count in self.outcomes.most_common())
        return f"{len(self.operations)} operations of a save; {self.fired.total()} errors ({kinds}): {fates}"

    def _first_save(self) -> Tree:
        make_disks(self._folder / "disks")
        try:
            run(Place(self._folder / "disks", self._folder / "images"), None, (BEFORE,))
            return read_tree(self._folder / "disks")
        finally:
            shutil.rmtree(self._folder / "disks")

    def faults(self, every: int = 1) -> list[Fault]:
        """All of them; or one of so many, and of each kind of operation with each error at least one."""
        variants = list(itertools.product(ERRNOS, HOWS))
        chosen: list[Fault] = []
        kinds: set[tuple[str, int, str]] = set()
        for number, (key, operation) in enumerate(self.operations):
            for at, (code, how) in enumerate(variants):
                if how == "half done" and not _halves(operation):
                    continue
                kind = (key[0], code, how)
                if kind not in kinds or (number + 3 * at) % every == 0:
                    kinds.add(kind)
                    chosen.append(Fault(key, code, how))
        return chosen

    def broken(self, faults: Iterable[Fault]) -> Iterator[str]:
        """A sentence for each fault that broke a promise."""
        for fault in faults:
            with self._disks() as place:
                try:
                    self._judge(fault, place)
                except (Broken, LastgoodError) as error:
                    yield f"{fault}: {error}"

    def _judge(self, fault: Fault, place: Place) -> None:
        came = run(place, fault, (FAULTY, AFTER), self._plant)
        _require(came.fired == 1, f"the fault has fired {came.fired} times")
        self.fired[fault.key[0]] += 1
        first, second = came.saved
        kept = first.state is SaveState.COMMITTED
        self.outcomes["committed" if kept else "lost"] += 1
        self._error(fault, came, first)
        _require(second.state is SaveState.COMMITTED, f"the next save is lost too: {second.blame}")
        for saved, steps in ((first, {BEFORE, FAULTY}), (second, {BEFORE, FAULTY, AFTER})):
            steps = steps if kept else steps - {FAULTY}
            listed = {step for step, committed in saved.listed.items() if committed}
            _require(listed == steps, f"the coordinator lists steps {sorted(listed)}, not {sorted(steps)}")
            self._look(fault, saved.disks, steps)
        recover(place, self.judge, self.judge.look(split(second.disks)))  # the next start

    def _error(self, fault: Fault, came: Came, saved: Saved) -> None:
        """What people are told: once, of our own kind, with errno, file and node."""
        lost = saved.state is not SaveState.COMMITTED
        if not came.told:
            _require(fault.may_pass and not lost, f"nobody was told, and the save is {saved.state.value}")
            return
        told, *others = came.told
        for other in others:  # of the other node, whose write nobody needs any more
            _require(lost and other.node != told.node and "was given up" in other.sentence, f"told too: {other}")
        name, path = errno.errorcode[fault.errno], str(told.facts["path"])
        _require(told.ours, f"a bare {told.error} was told: {told.sentence}")
        _require(told.facts["errno"] == fault.errno and name in told.sentence, f"{name} is not named: {told.sentence}")
        _require(path in told.sentence and self._means(path, fault), f"the file is not named: {told.sentence}")
        if fault.disk != STORE:
            _require(told.node == self._names[fault.disk], f"told of {told.node}: {told.sentence}")
        if lost:
            blame = saved.blame
            _require(told.command in COMES_FIRST, f"{told.command} failed, and the save with it: {blame}")
            _require(blame is not None and blame.node == told.node, f"no node is blamed: {blame}")
            _require(name in str(blame) and path in str(blame), f"neither errno nor file is named: {blame}")
        else:
            _require(told.command != "Stage", f"{told.command} failed, and the save is committed: {told.sentence}")

    def _means(self, told: str, fault: Fault) -> bool:
        """Whether a path is that of the operation that failed, or of what was to be made by it."""
        place = Path(told).relative_to(self._folder / "disks")
        name = re.sub(r"^\.(.*)\.\w{26}\.tmp$", r"\1", place.name)
        place, failed = place.with_name(name), Path(re.sub(r"\.([^/]*)\.\*\.tmp$", r"\1", fault.key[1]))
        return place.is_relative_to(failed) or failed == place.parent

    def _look(self, fault: Fault, disks: Tree, steps: set[int]) -> None:
        """What lies there: whole checkpoints of these steps everywhere, and of a lost one nothing but its records."""
        trees = split(disks)
        for name, view in self.judge.look(trees).items():
            standing = {head.step for head in view.committed.values()}
            _require(standing == steps, f"{name}: steps {sorted(standing)} are committed, not {sorted(steps)}")
        for path in disks:
            if is_temporary(path.rpartition("/")[2]):
                _require(fault.leaves_a_file, f"{path} is left until the next start")
            elif FAULTY not in steps and f"/{PATHS.attempt_dir(FAULTY, f'A{FAULTY}')}" in f"/{path}":
                raise Broken(f"{path} is left of the attempt that failed")

    def _disks(self) -> Fresh:
        return Fresh(self._folder / "disks", self._folder / "images", self._start)


def _halves(operation: Operation) -> bool:
    half_bytes = len(operation.data) // 2
    return operation.kind == "write" and half_bytes > 0 and (not operation.direct or half_bytes % PAGE_BYTES == 0)


def _require(so: bool, otherwise: str) -> None:
    if not so:
        raise Broken(otherwise)
