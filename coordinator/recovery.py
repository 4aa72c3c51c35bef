"""What the records of an attempt mean: the recovery table of DESIGN section 4 as one pure function.

The rule: an attempt is committed if and only if every participant's record says accept; COMPLETED or a ledger entry
anywhere proves that this was so. Used for attempts found after a restart and for own ones whose outcome is not known.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from .messages import RecordState


class Verdict(enum.Enum):
    """What the records say."""

    COMMITTED = "committed"  # roll forward to all
    ABORTED = "aborted"  # at least one durable refuse: it can never be committed
    REFUSE_FIRST = "refuse first"  # a heard participant has no record: it records refuse, then look again
    IN_DOUBT = "in doubt"  # all heard accept, one is unheard: wait for it


@dataclass(frozen=True)
class Decision:
    """The verdict, its reason as a sentence, and the heard participants that must record refuse now."""

    verdict: Verdict
    reason: str
    refuse_at: tuple[str, ...] = ()


def decide(
    participants: Collection[str],
    records: Mapping[str, RecordState],
    proof: str | None,
    heard: Collection[str],
) -> Decision:
    """Decides by the table, first row that fits.

    `records` holds what is known of each participant's record (absent: nothing is known); `proof` says where COMPLETED
    or a ledger entry was seen; `heard` are the nodes that answered hello with our epoch, so that no accept of a lower
    epoch can appear there any more.
    """
    if proof is not None:
        return Decision(Verdict.COMMITTED, f"{proof}, which proves the commit")
    known = {node: records.get(node, RecordState.NONE) for node in participants}
    if known and all(record is RecordState.ACCEPT for record in known.values()):
        return Decision(Verdict.COMMITTED, f"every participant's record says accept ({_names(known)})")
    without = tuple(
        sorted(
            node
            for node, record in known.items()
            if node in heard and record not in (RecordState.ACCEPT, RecordState.REFUSE)
        )
    )
    refusing = [node for node, record in known.items() if record is RecordState.REFUSE]
    if refusing:
        return Decision(Verdict.ABORTED, f"the record of {_names(refusing)} says refuse", without)
    if without:
        return Decision(
            Verdict.REFUSE_FIRST, f"{_names(without)} was heard and has no record, so it was never announced", without
        )
    unheard = [node for node in known if node not in heard]
    return Decision(
        Verdict.IN_DOUBT,
        f"every record that was heard says accept, and {_names(unheard)} is not heard: neither committed nor aborted "
        "until it is",
    )


def _names(nodes: Iterable[str]) -> str:
    ordered = sorted(nodes)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")
