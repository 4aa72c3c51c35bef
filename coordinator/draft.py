"""What the manifest of an attempt will say, drawn up from its votes once all of them are in. Pure."""

from __future__ import annotations

from .attempt import Attempt
from .commands import Draft, MemberWord
from .messages import AttemptHead
from .settings import Settings


def draft_of(attempt: Attempt, settings: Settings, parent: AttemptHead | None) -> Draft:
    """The draft. The attempt has every staging vote."""
    assert attempt.roster is not None and attempt.window is not None
    node_of = {member: node for node, members in attempt.roster.members_of.items() for member in members}
    return Draft(
        run=settings.run,
        head=attempt.head,
        kind=attempt.kind,
        tag=attempt.tag,
        reason=attempt.reason,
        requested_by=attempt.requested_by,
        request_ids=attempt.request_ids,
        parent=parent,
        roles=tuple(role for role in attempt.roster.roles if role.components),
        members=tuple(
            MemberWord(member, node_of[member], attempt.updates[member]) for member in sorted(attempt.updates)
        ),
        participants=attempt.participants,
        shards=tuple(shard for node in attempt.participants for shard in attempt.shards[node]),
        metrics=attempt.window.metrics,
        fingerprint={**settings.fingerprint, **attempt.roster.fingerprint},
    )
