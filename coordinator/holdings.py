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
        self._incarnations: dict[str, str] = {}  # of the stagers that told it
        self._noted: dict[tuple[str, str], int] = {}  # node, attempt -> the event that changed it last, by its number
        self._events = 0
        self._asked: set[int] = set()  # hellos that are not answered yet: the number of events when each was sent

    def ask(self) -> int:
        """A hello is sent; what is noted from here on, its answer may not know yet. To be given to `answered`."""
        self._events += 1
        self._asked.add(self._events)
        return self._events

    def answered(self, asked: int) -> None:
        """The hello was answered, or never will be."""
        self._asked.discard(asked)
        if not self._asked:
            self._noted.clear()

    def hear(self, inventory: Inventory, asked: int) -> None:
        """A node told what it holds, asked for by this hello."""
        node, told = inventory.node, {found.attempt: found for found in inventory.attempts}
        if self._incarnations.get(node) == inventory.incarnation:
            before = self._nodes.get(node, {})
            for attempt in [a for (at, a), when in self._noted.items() if at == node and when > asked]:
                told.pop(attempt, None)
                if attempt in before:
                    told[attempt] = before[attempt]
        self._nodes[node] = told
        self._incarnations[node] = inventory.incarnation

    def lose(self, node: str) -> None:
        """Nobody knows what the node holds until it is heard again."""
        self._nodes.pop(node, None)

    def forget(self, node: str, attempt: str) -> None:
        """The attempt was collected on this node."""
        self._nodes.get(node, {}).pop(attempt, None)
        if not any(attempt in held for held in self._nodes.values()):
            self.words.pop(attempt, None)

    def of(self, heard: Collection[str]) -> dict[str, Iterable[AttemptInventory]]:
        """What each node that is heard holds."""
        return {node: tuple(held.values()) for node, held in self._nodes.items() if node in heard}

    def note(self, event: ev.Event, core: Protocol) -> bool:
        """Works in the outcome of a command to a node. Answers whether anything is different now."""
        if not isinstance(event, _TELLING) or event.node not in self._nodes:
            return False
        if self._asked:
            self._events += 1
            self._noted[event.node, event.attempt] = self._events
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
