"""The alarm for weights that stand still: two saves in a row hold the same bytes though the optimizer stepped between.

It has been seen in the field that every later checkpoint was the first one again (a stale buffer was copied), and that
nobody noticed before the reward collapsed on resume. Part of the protocol core (as pure as protocol.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from .attempt import Attempt
from .messages import MemberId


@dataclass(frozen=True)
class _Seen:
    """One shard of weights as it was saved last."""

    step: int
    updates: int
    digest: str
    moved: bool  # it was seen to change since the live state was made or restored


class Standstill:
    """Remembers the digests of the last saved weights, shard by shard."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, MemberId], _Seen] = {}  # by component and member

    def look(self, attempt: Attempt) -> tuple[str, ...]:
        """One sentence for each component whose weights are those of the save before. It is staged everywhere.

        On some members only: of those whose shard has changed before. (A shard may hold nothing but frozen parameters.)
        """
        assert attempt.roster is not None
        alike: dict[tuple[str, str], list[tuple[MemberId, _Seen]]] = {}  # by role and component
        others: set[tuple[str, str]] = set()  # some shard of it is not as it was
        for shards in attempt.shards.values():
            for shard in shards:
                member = MemberId(shard.role, shard.rank)
                updates = attempt.updates.get(member)
                if (member, shard.component) not in attempt.roster.weights or updates is None:
                    continue
                key, of = (shard.component, member), (shard.role, shard.component)
                before = self._last.get(key)
                if before is None:
                    others.add(of)
                    self._last[key] = _Seen(attempt.head.step, updates, shard.digest, moved=False)
                    continue
                still = before.digest == shard.digest and updates > before.updates
                if still:
                    alike.setdefault(of, []).append((member, before))
                else:
                    others.add(of)
                moved = before.moved or before.digest != shard.digest
                self._last[key] = _Seen(attempt.head.step, updates, shard.digest, moved)
        told = []
        for (role, component), found in sorted(alike.items()):
            stale = [(m, seen) for m, seen in sorted(found, key=lambda each: each[0]) if seen.moved]
            if (role, component) not in others:
                stale = sorted(found, key=lambda each: each[0])
            if stale:
                told.append(self._sentence(attempt, component, stale, everyone=(role, component) not in others))
        return tuple(told)

    def _sentence(
        self, attempt: Attempt, component: str, stale: list[tuple[MemberId, _Seen]], *, everyone: bool
    ) -> str:
        member, seen = stale[0]
        names = ", ".join(str(each) for each, _ in stale[:8]) + (", ..." if len(stale) > 8 else "")
        who = f"role {member.role}" if everyone else names
        steps = (attempt.updates[member] or 0) - seen.updates
        return (
            f"the weights {component} of {who} at step {attempt.head.step} are bit for bit those of step {seen.step}, "
            f"though the optimizer has stepped {steps} times since: does it train (learning rate 0, frozen "
            "parameters), and is its state function given the live model?"
        )

    def forget(self) -> None:
        """Live state was restored: what comes next is compared with nothing."""
        self._last = {}
