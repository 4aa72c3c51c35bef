"""What lies on the nodes' disks, as last told by hello and changed by what was done since. For reports and resume.

Decisions are never taken from here (the core has its own facts); a node's next hello replaces what is noted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from . import events as ev
from .messages import AttemptInventory, Inventory, RecordState

if TYPE_CHECKING:
    from .protocol import Protocol


_TELLING = (ev.Staged, ev.Accepted, ev.Refused, ev.Published, ev.DurableNoted, ev.Discarded)


class Holdings:
    """node -> attempt -> what lies there."""

    def __init__(self) -> None:
        self.words: dict[str, tuple[str | None, str]] = {}  # attempt -> (tag, kind), of those whose manifest is known
        self._nodes: dict[str, dict[str, AttemptInventory]] = {}

    def hear(self, inventory: Inventory) -> None:
        """A node told what it holds."""
        self._nodes[inventory.node] = {found.attempt: found for found in inventory.attempts}

    def lose(self, node: str) -> None:
        """Nobody knows what the node holds until it is heard again."""
        self._nodes.pop(node, None)

    def forget(self, attempt: str) -> None:
        """The attempt was collected on every node."""
        self.words.pop(attempt, None)
        for held in self._nodes.values():
            held.pop(attempt, None)

    def of(self, heard: Collection[str]) -> dict[str, Iterable[AttemptInventory]]:
        """What each node that is heard holds."""
        return {node: tuple(held.values()) for node, held in self._nodes.items() if node in heard}

    def note(self, event: ev.Event, core: Protocol) -> bool:
        """Works in the outcome of a command to a node. Answers whether anything is different now."""
        if not isinstance(event, _TELLING) or event.node not in self._nodes:
            return False
        held = self._nodes[event.node]
        if isinstance(event, ev.Discarded):
            held.pop(event.attempt, None)
            return True
        attempt = core.attempts.get(event.attempt)
        if attempt is None:
            return False
        head = attempt.head
        now = held.get(event.attempt) or AttemptInventory(
            head.attempt, head.step, head.epoch, head.sequence, RecordState.NONE, False, False, False, ()
        )
        if isinstance(event, ev.Staged):
            now = dataclasses.replace(now, staged=True)
        elif isinstance(event, (ev.Accepted, ev.Refused)):
            known = event.record in (RecordState.ACCEPT, RecordState.REFUSE)
            now = dataclasses.replace(now, record=event.record if known else now.record)
            if event.record is RecordState.ACCEPT:
                now = dataclasses.replace(now, participants=attempt.participants, manifest=attempt.manifest)
                self.words.setdefault(attempt.id, (attempt.tag, attempt.kind.value))
        elif isinstance(event, ev.Published):
            now = dataclasses.replace(now, completed=True, participants=attempt.participants)
        else:
            now = dataclasses.replace(now, durable=True)
        held[event.attempt] = now
        return True
