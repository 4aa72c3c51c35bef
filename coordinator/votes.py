"""Checks of the votes: promise 4 in code. A vote that does not fit names its owner; it is never repaired.

Pure functions of an attempt and one node's answer; they answer a Blame, or None when the vote counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..storage.manifest import ShardRecord
from .attempt import Attempt
from .messages import Blame, MemberId, NodeSnapshot


def check_snapshot(attempt: Attempt, node: str, snapshot: NodeSnapshot) -> Blame | None:
    """Same step and update count as the window's for exactly the members that were ordered, with all components."""
    assert attempt.roster is not None and attempt.window is not None
    phase = attempt.phase.value
    if snapshot.node != node:
        return Blame(phase, f"the snapshot vote asked of {node} came from {snapshot.node}", node=node)
    owed = attempt.roster.members_of[node]
    components = {declaration.role: declaration.components for declaration in attempt.roster.roles}
    seen: set[MemberId] = set()
    for report in snapshot.members:
        member = report.member
        if member in seen or member not in owed:
            what = "twice" if member in seen else "though it was not asked for it"
            return Blame(phase, f"member {member} was voted for {what}", node=node, member=member)
        seen.add(member)
        if report.step != attempt.head.step:
            reason = f"member {member} copied step {report.step}, the attempt saves step {attempt.head.step}"
            return Blame(phase, reason, node=node, member=member)
        if report.updates != attempt.window.updates[member]:
            reason = (
                f"member {member} copied its state after {report.updates} optimizer updates, "
                f"at the end of the step it had {attempt.window.updates[member]}"
            )
            return Blame(phase, reason, node=node, member=member)
        if set(report.components) != set(components[member.role]):
            reason = (
                f"member {member} copied components {sorted(report.components)}, "
                f"declared are {sorted(components[member.role])}"
            )
            return Blame(phase, reason, node=node, member=member)
    if len(seen) != len(owed):
        member = next(member for member in owed if member not in seen)
        return Blame(phase, f"the snapshot vote of {node} lacks member {member}", node=node, member=member)
    return None


def check_shards(attempt: Attempt, node: str, shards: Sequence[ShardRecord]) -> Blame | None:
    """Every component of every member of the node, exactly once, and nothing else."""
    assert attempt.roster is not None
    phase = attempt.phase.value
    components = {declaration.role: declaration.components for declaration in attempt.roster.roles}
    owed = {(m.role, m.rank, name) for m in attempt.roster.members_of[node] for name in components[m.role]}
    seen: set[tuple[str, int, str]] = set()
    for shard in shards:
        key = (shard.role, shard.rank, shard.component)
        member = MemberId(shard.role, shard.rank)
        if shard.node != node:
            reason = f"component {shard.component} of {member} was staged on {shard.node}, voted for by {node}"
            return Blame(phase, reason, node=node, member=member)
        if key in seen or key not in owed:
            what = "twice" if key in seen else "though nobody declared it"
            return Blame(phase, f"component {shard.component} of {member} was staged {what}", node=node, member=member)
        seen.add(key)
    if len(seen) != len(owed):
        role, rank, name = min(owed - seen)
        member = MemberId(role, rank)
        return Blame(phase, f"component {name} of {member} was not staged", node=node, member=member)
    return None


def silent(attempt: Attempt, nodes: Sequence[str], waited_s: float, limit: str) -> Blame:
    """The Blame for a deadline: who has not answered."""
    phase = attempt.phase.value
    if not nodes:
        return Blame(phase, f"{limit} passed", waited_s=waited_s)
    listed = []
    members_of = attempt.roster.members_of if attempt.roster is not None else {}
    for node in nodes[:8]:
        members = members_of.get(node, ())
        names = ", ".join(str(member) for member in members[:8]) + (", ..." if len(members) > 8 else "")
        listed.append(f"{node} ({names})" if names else node)
    more = f" and {len(nodes) - 8} more nodes" if len(nodes) > 8 else ""
    members = members_of.get(nodes[0], ())
    said = next((f"; {node} said last: {why}" for (_, node), why in attempt.last_failure.items() if node in nodes), "")
    return Blame(
        phase,
        f"{limit} passed without an answer from {', '.join(listed)}{more}{said}",
        node=nodes[0] if len(nodes) == 1 else None,
        member=members[0] if len(nodes) == 1 and len(members) == 1 else None,
        waited_s=waited_s,
    )
