"""The alarm for weights that stand still: two saves in a row hold the same bytes though the optimizer stepped between.

It has been seen in the field that every later checkpoint was the first one again (a stale buffer was copied), and that
nobody noticed before the reward collapsed on resume. Part of the protocol core (as pure as protocol.py).
"""

from __future__ import annotations

from .attempt import Attempt
from .messages import MemberId

WEIGHTS = "model"  # the component that an optimizer changes


class Standstill:
    """Remembers the digests of the last saved weights, role by role."""

    def __init__(self) -> None:
        # role -> step, updates and digests by member
        self._last: dict[str, tuple[int, dict[MemberId, int], dict[MemberId, str]]] = {}

    def look(self, attempt: Attempt) -> tuple[str, ...]:
        """One sentence for each role whose weights are those of the save before. The attempt is staged everywhere."""
        digests: dict[str, dict[MemberId, str]] = {}
        for shards in attempt.shards.values():
            for shard in shards:
                if shard.component == WEIGHTS:
                    digests.setdefault(shard.role, {})[MemberId(shard.role, shard.rank)] = shard.digest
        told = []
        for role, now in sorted(digests.items()):
            updates = {member: attempt.updates.get(member) for member in now}
            counted = {member: count for member, count in updates.items() if count is not None}
            if len(counted) != len(now):
                continue  # no optimizer changes them
            before = self._last.get(role)
            self._last[role] = (attempt.head.step, counted, now)
            if before is None or before[2] != now:
                continue
            step, counts, _ = before
            if all(counted[member] > counts.get(member, counted[member]) for member in counted):
                steps = min(counted[member] - counts[member] for member in counted)
                told.append(
                    f"the weights of role {role} at step {attempt.head.step} are bit for bit those of step {step}, "
                    f"though its optimizer has stepped {steps} times since: does the role train (learning rate 0, "
                    "frozen parameters), and is its state function given the live model?"
                )
        return tuple(told)

    def forget(self) -> None:
        """Live state was restored: what comes next is compared with nothing."""
        self._last = {}
