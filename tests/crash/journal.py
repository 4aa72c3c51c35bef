"""What the story has been told: every call that began, and every call that returned with its answer.

A mark stands between two operations: `at` is the number of operations that were done before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mark:
    """One call's beginning or end. `facts` name what it was about; of an end, what it answered too."""

    at: int
    call: str
    ended: bool
    facts: dict[str, Any] = field(default_factory=dict)


class Journal:
    """Gives every mark to `tell` at once, so that it outlives a kill."""

    def __init__(self, tell: Callable[[Mark], None], count: Callable[[], int] = lambda: 0) -> None:
        self._tell = tell
        self._count = count

    @contextlib.contextmanager
    def call(self, name: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Around one call of the product. What the block puts into the dictionary is part of the end's facts.

        A call that raises has an unknown outcome: it never ends.
        """
        self._tell(Mark(self._count(), name, False, facts))
        answer = dict(facts)
        yield answer
        self._tell(Mark(self._count(), name, True, answer))


def known_after(marks: list[Mark], operations: int) -> list[Mark]:
    """The marks that count when the power goes after so many operations: every call that has returned, and every call
    that has begun and done something."""
    return [mark for mark in marks if mark.at < operations or (mark.ended and mark.at == operations)]
