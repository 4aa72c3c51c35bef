"""Two saves by real stagers and a real coordinator in a child, on disks of which one answers with an error, once.

In the first save one operation fails. Which one is told by its name and its count (Key): two nodes write at once, and
no two runs mix their operations alike. The child says what came of it; errors.py judges.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastgood.coordinator import runner
from lastgood.coordinator.driver import Driver
from lastgood.coordinator.epochs import claim_epoch
from lastgood.coordinator.messages import Blame, SaveState
from lastgood.coordinator.policies import Decision
from lastgood.coordinator.settings import Settings
from lastgood.storage import files
from lastgood.storage.direct import PAGE_BYTES
from lastgood.storage.errors import LastgoodError
from lastgood.storage.files import is_temporary
from tests.crash import cluster, plants
from tests.crash.children import in_child
from tests.crash.cluster import COMMITTED_AT, DECLARATIONS, NODES, PATHS, RUN, Place, Stagers
from tests.crash.disk_model import Tree, read_tree
from tests.crash.judge import Broken
from tests.crash.operations import Layer, Operation, Perform

WAIT_S = 60.0
BEFORE, FAULTY, AFTER = 1, 2, 3  # the steps that are saved; attempts are A1, A2, A3
DUE = Decision(True, "the test saves every step")
NAMED = ("create", "rename", "link", "unlink", "mkdir", "rmdir")  # their errors name a file, as Python's do

Key = tuple[str, str, int]  # (kind, path without what is random in it, how many of these came before it)


@dataclass(frozen=True)
class Fault:
    """One operation that fails."""

    key: Key
    errno: int
    how: str

    @property
    def disk(self) -> str:
        return self.key[1].split("/", 1)[0]

    @property
    def leaves_a_file(self) -> bool:
        """Whether it may leave a temporary file: that costs space until the next start, and nothing else."""
        kind, path, _ = self.key
        temporary = is_temporary(path.rpartition("/")[2])
        return temporary and (kind == "unlink" or (kind == "create" and self.how == "done"))

    @property
    def may_pass(self) -> bool:
        """Whether nobody needs to be told: no more is lost than space, or that it was done is seen by looking."""
        return self.key[0] == "unlink" or (self.key[0] in ("link", "mkdir") and self.how == "done")

    def __str__(self) -> str:
        kind, path, nth = self.key
        return f"{errno.errorcode[self.errno]} at {kind} {path}, the {nth + 1}. time ({self.how})"


@dataclass
class Told:
    """An error that came back to the coordinator."""

    command: str
    node: str | None
    error: str
    ours: bool  # a LastgoodError
    facts: dict[str, Any]
    sentence: str


@dataclass
class Saved:
    """What became of one save, and what lay on the disks when everything about it was over."""

    state: SaveState
    blame: Blame | None
    listed: dict[int, bool]  # step -> whether the coordinator lists it as committed
    disks: Tree


@dataclass
class Came:
    """What a child says."""

    names: dict[str, str] = field(default_factory=dict)  # disk -> the node's name
    saved: list[Saved] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    fired: int = 0
    seen: list[tuple[Key, Operation]] = field(default_factory=list)  # what the first save did


class Trap:
    """Watches operations; from `arm` to `disarm` the one that `fault` names fails, once."""

    def __init__(self, root: Path, fault: Fault | None) -> None:
        self.fault = fault
        self.fired = 0
        self.seen: list[tuple[Key, Operation]] = []
        self._root = root
        self._counts: Counter[tuple[str, str]] | None = None
        self._next_fails: str | None = None

    def arm(self) -> None:
        self._counts = Counter()

    def disarm(self) -> None:
        self._counts = None

    def watch(self, operation: Operation, perform: Perform, half: Perform | None) -> Any:
        if self._counts is None:
            return perform()
        if operation.kind == "write" and self._next_fails == operation.path:
            self._next_fails = None
            self._fail(operation)
        name = (operation.kind, re.sub(r"\.\w{26}\.tmp$", ".*.tmp", operation.path))
        key = (*name, self._counts[name])
        self._counts[name] += 1
        self.seen.append((key, operation))
        if self.fault is None or self.fault.key != key:
            return perform()
        if self.fault.how == "half done":
            assert half is not None
            self._next_fails = operation.path  # a short write tells how many bytes it took; the next one tells why
            return half()
        if self.fault.how == "done":
            with contextlib.suppress(FileNotFoundError):  # there was nothing to delete
                perform()
        return self._fail(operation)

    def _fail(self, operation: Operation) -> None:
        assert self.fault is not None
        self.fired += 1
        what = (self.fault.errno, os.strerror(self.fault.errno))
        raise OSError(*what, str(self._root / operation.path)) if operation.kind in NAMED else OSError(*what)


def run(place: Place, fault: Fault | None, steps: tuple[int, ...], plant: str | None = None) -> Came:
    """Saves `steps` in a child; the first of them with the fault."""

    def work(send: Callable[[Any], None]) -> None:
        cluster.steady(steps[0])
        files.WRITE_BYTES = 2 * PAGE_BYTES  # so that half of a direct write is one that a disk may do
        plants.plant(plant)
        came, trap = Came(), Trap(place.root, fault)
        _listen(came)
        Layer(place.root, trap.watch).install()
        asyncio.run(_scene(place, came, trap, steps))
        came.fired, came.seen = trap.fired, trap.seen
        send(("answer", came))

    heard = in_child(work)
    if heard.trouble is not None:
        raise Broken(f"the run does not go on: {heard.trouble}")
    return heard.answer


def _listen(came: Came) -> None:
    """Every error that an attempt's call brings back is noted."""
    real = runner.failure

    def failure(command: Any, error: BaseException) -> Any:
        facts = {name: getattr(error, "facts", {}).get(name) for name in ("path", "errno", "node")}
        node = getattr(command, "node", None)
        kind = type(error).__name__
        came.told.append(Told(type(command).__name__, node, kind, isinstance(error, LastgoodError), facts, str(error)))
        return real(command, error)

    runner.failure = failure


async def _scene(place: Place, came: Came, trap: Trap, steps: tuple[int, ...]) -> None:
    stagers, numbers = Stagers(place), itertools.count(steps[0])
    for node in NODES:
        came.names[node] = stagers.open(node).node
        await stagers.attend(node)
    floor = max([await stager.highest_epoch() for stager in stagers.of.values()])
    driver = Driver(
        Settings(RUN, claim_epoch(place.store, PATHS, "the owner", floor), retry_s=0.01, retry_max_s=0.02),
        store=place.store,
        new_attempt_id=lambda: f"A{next(numbers)}",
        clock=asyncio.get_running_loop().time,
        now_utc=lambda: COMMITTED_AT,
    )
    for declaration in DECLARATIONS:
        driver.declare(declaration)
    for node in NODES:
        await driver.add_node(stagers.of[node])
    await driver.recover()
    for step in steps:
        if step == steps[0]:
            trap.arm()
        came.saved.append(await _save(driver, step, place))
        trap.disarm()
    driver.core.invariants()
    assert not driver.faults, driver.faults
    await driver.stop()
    await stagers.close()


async def _save(driver: Driver, step: int, place: Place) -> Saved:
    """One save, until everything about it is over."""
    window = await driver.open_window(step, None, DUE)
    assert window.opened, window
    (save,) = window.saves
    outcome = await driver.wait(save.request_id, SaveState.COMMITTED, WAIT_S)
    assert not outcome.in_doubt, outcome
    assert (await driver.drain(WAIT_S)).drained and await driver._until(lambda: not driver.core.active, WAIT_S)
    await driver.close_window()
    listed = {one.step: one.committed for one in driver.checkpoints()}
    state = SaveState.COMMITTED if outcome.committed else outcome.state
    return Saved(state, outcome.blame, listed, read_tree(place.root))
