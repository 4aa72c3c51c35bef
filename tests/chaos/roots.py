"""What lies in a trial's directories while it runs: which attempts are committed, and how far the newest one is."""

from __future__ import annotations

import glob
from dataclasses import dataclass, field
from pathlib import Path

from lastgood.storage.errors import IntegrityError
from lastgood.storage.layout import COMPLETED, STAGED, parse_step_name
from lastgood.storage.manifest import Completed, Tombstone, read_completed

Order = tuple[int, int]


@dataclass
class Seen:
    """A commit that was observed from outside, on a disk or in the answer of `checkpoints()`."""

    attempt: str
    step: int
    order: Order
    at: float  # seconds since 1970
    where: set[str] = field(default_factory=set)
    changed: str | None = None  # what became of its COMPLETED that must not


class Roots:
    """The staging directories and the store of one run."""

    def __init__(self, folder: Path, run: str, slots: int) -> None:
        self.run = run
        self.nodes = [folder / f"node-{slot}" for slot in range(slots)]
        self.store = folder / "store"
        self.seen: dict[str, Seen] = {}
        self._read: dict[Path, bytes] = {}

    def all(self) -> list[Path]:
        """Those that exist."""
        return [root for root in (*self.nodes, self.store) if (root / self.run).is_dir()]

    def _found(self, root: Path, pattern: str) -> list[Path]:
        """Paths of the run that match; directories that are collected meanwhile are passed over (Path.glob raises)."""
        return [Path(found) for found in glob.glob(f"{glob.escape(str(root / self.run))}/{pattern}")]  # noqa: PTH207

    def look(self, now: float) -> None:
        """Notes every COMPLETED that stands now, and that those noted before have not changed but to a tombstone."""
        for root in self.all():
            for path in self._found(root, f"global_step_*/*/{COMPLETED}"):
                try:
                    data = path.read_bytes()
                except FileNotFoundError:
                    continue
                if self._read.get(path) == data:
                    continue
                before = self._read.get(path)
                self._read[path] = data
                try:
                    found = read_completed(data, where=str(path))
                except IntegrityError as error:
                    seen = self.seen.setdefault(path.parent.name, Seen(path.parent.name, -1, (-1, -1), now))
                    seen.changed = str(error)
                    continue
                if isinstance(found, Completed):
                    seen = self.note(found.attempt, found.step, (found.epoch, found.sequence), now, root.name)
                    if before is not None:
                        seen.changed = f"{path} was written again"
                elif found.attempt not in self.seen:
                    self.note(found.attempt, found.step, (found.epoch, found.sequence), now, root.name)

    def note(self, attempt: str, step: int, order: Order, now: float, where: str) -> Seen:
        seen = self.seen.setdefault(attempt, Seen(attempt, step, order, now))
        seen.where.add(where)
        return seen

    def phase(self) -> str | None:
        """How far the newest attempt on the disks is; None when it is durable or there is none."""
        newest: Path | None = None
        for root in self.nodes:
            for path in self._found(root, "global_step_*/*"):
                if path.is_dir() and parse_step_name(path.parent.name) is not None:
                    newest = path if newest is None or path.name > newest.name else newest
        if newest is None:
            return None
        step, attempt = newest.parent.name, newest.name  # ids sort by the time of their making
        places = [root / self.run / step / attempt for root in self.nodes]
        places = [place for place in places if place.is_dir()]
        records = [root / self.run / "records" / f"{attempt}.json" for root in self.nodes]
        if (self.store / self.run / step / attempt / COMPLETED).exists():
            return None
        if any((place / COMPLETED).exists() for place in places):
            return "upload" if all((place / COMPLETED).exists() for place in places) else "publish"
        if any(record.exists() for record in records):
            return "accept"
        return "accept" if all((place / STAGED).exists() for place in places) else "stage"


__all__ = ["Completed", "Order", "Roots", "Seen", "Tombstone"]
