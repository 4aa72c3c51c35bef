"""Which calls an attempt needs now: the difference between what its phase asks for and what is known to be done.

Pure. A call is asked once, and again only when it failed (after a pause that doubles) or its node was heard anew; so
a restart of any participant needs no case of its own. Calls go only to nodes that are heard. Looked at are the nodes in
`attempt.ask` only: an answer of one node changes no other node's calls, unless the phase moves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from . import commands as cmd
from .attempt import OUTSTANDING, Attempt
from .messages import Keepsake, RecordState, SnapshotOrder
from .moves import PROVEN, Phase
from .settings import Settings

_IDLE = (Phase.FOUND, Phase.IN_DOUBT, Phase.ABORTED)
_DECIDED = (RecordState.ACCEPT, RecordState.REFUSE)


def remaining_s(attempt: Attempt, now_s: float) -> float:
    """Seconds that a node is given: a little less than is left, so that its own error arrives before our deadline."""
    left = min(attempt.phase_deadline_s, attempt.deadline_s) - now_s
    return max(left - min(1.0, left * 0.1), 0.001)


def calls_due(
    attempt: Attempt,
    now_s: float,
    heard: Collection[str],
    settings: Settings,
    everyone_heard: bool,
    draft: Callable[[Attempt], cmd.Draft],
) -> list[cmd.Command]:
    """The commands to give now; notes each as outstanding in `attempt.calls`."""
    out: list[cmd.Command] = []
    head, phase, calls = attempt.head, attempt.phase, attempt.calls
    if phase in _IDLE and not attempt.to_release:
        return out
    may_delete = phase is Phase.ABORTING and attempt.may_delete(everyone_heard)
    if may_delete and not attempt.deleting:
        attempt.ask = None  # from now on it is every node's turn
    attempt.deleting = may_delete
    nodes: Sequence[str] = attempt.participants
    if attempt.ask is not None:
        nodes = [node for node in sorted(attempt.ask) if attempt.has(node)]

    def ready(kind: type[cmd.AttemptCommand], node: str = "") -> bool:
        if node and node not in heard:
            return False
        due = calls.get((kind, node))
        if due is not None and due > now_s:
            return False
        calls[kind, node] = OUTSTANDING
        return True

    if phase is Phase.PAUSING:
        assert attempt.roster is not None
        for node in nodes:
            if node in attempt.roster.pausing and node not in attempt.paused and ready(cmd.Pause, node):
                attempt.to_release.add(node)
                out.append(cmd.Pause(head, node, remaining_s(attempt, now_s)))
        return out
    if phase is Phase.SNAPSHOTTING:
        assert attempt.roster is not None
        for node in nodes:
            if node not in attempt.snapshots and ready(cmd.Snapshot, node):
                members = attempt.roster.members_of[node]
                deadline_s = remaining_s(attempt, now_s)
                order = SnapshotOrder(
                    head, members, deadline_s, settings.overlapped, _keepsake(attempt), attempt.origin
                )
                out.append(cmd.Snapshot(head, node, order))
        return out

    if attempt.to_release:
        asked = attempt.to_release if attempt.ask is None else attempt.to_release & attempt.ask
        out += [cmd.Release(head, node) for node in sorted(asked) if ready(cmd.Release, node)]

    if phase is Phase.STAGING:
        for node in nodes:
            if node not in attempt.shards and ready(cmd.Stage, node):
                out.append(cmd.Stage(head, node, remaining_s(attempt, now_s)))
    elif phase is Phase.ACCEPTING:
        if attempt.manifest is None:
            if ready(cmd.BuildManifest):
                attempt.drafted = True
                out.append(cmd.BuildManifest(head, draft(attempt)))
            return out
        for node in nodes:
            if attempt.records.get(node) is not RecordState.ACCEPT and ready(cmd.Accept, node):
                attempt.may_be_accepted = True
                out.append(cmd.Accept(head, node, attempt.manifest, remaining_s(attempt, now_s)))
    elif phase is Phase.ABORTING:
        for node in nodes:
            if attempt.records.get(node) not in _DECIDED and not attempt.superseded:
                if ready(cmd.Refuse, node):
                    reason = str(attempt.blame) if attempt.blame is not None else "found unfinished at recovery"
                    out.append(cmd.Refuse(head, node, reason))
            elif may_delete and node not in attempt.discarded and ready(cmd.Discard, node):
                out.append(cmd.Discard(head, node))
    elif phase in PROVEN:
        out += _after_commit(attempt, nodes, settings, heard, ready)
    return out


def _keepsake(attempt: Attempt) -> Keepsake:
    assert attempt.roster is not None and attempt.window is not None
    roles = tuple(role for role in attempt.roster.roles if role.components)
    return Keepsake(roles, attempt.window.metrics, tuple(pending.request for pending in attempt.requests))


def _after_commit(
    attempt: Attempt,
    nodes: Sequence[str],
    settings: Settings,
    heard: Collection[str],
    ready: Callable[..., bool],
) -> list[cmd.Command]:
    out: list[cmd.Command] = []
    head, manifest = attempt.head, attempt.manifest
    if manifest is None:
        return out  # only the store's or the ledger's word is known; a node that has the manifest will bring it
    holders = [node for node in nodes if node not in attempt.lost_at] if attempt.lost_at else nodes
    for node in holders:
        if node not in attempt.published and ready(cmd.Publish, node):
            out.append(cmd.Publish(head, node, manifest))
    if attempt.phase is Phase.DURABLE:
        for node in holders:
            if node in attempt.published and node not in attempt.noted and ready(cmd.NoteDurable, node):
                out.append(cmd.NoteDurable(head, node))
        return out
    if (
        settings.upload
        and not attempt.ledger_written
        and attempt.calls.get((cmd.WriteLedger, "")) != OUTSTANDING
        and first_publish_over(attempt, heard)
        and ready(cmd.WriteLedger)
    ):
        out.append(cmd.WriteLedger(head, attempt.participants, manifest))
    if attempt.phase is Phase.UPLOADING:
        for node in nodes:
            if node not in attempt.uploaded and ready(cmd.Upload, node):
                out.append(cmd.Upload(head, node))
        if len(attempt.uploaded) == len(attempt.participants) and ready(cmd.CompleteRemotely):
            out.append(cmd.CompleteRemotely(head, manifest))
    return out


def first_publish_over(attempt: Attempt, heard: Collection[str]) -> bool:
    """Whether each participant has been published to, or was tried once, or is not heard."""
    tried, lost_at, nodes = attempt.publish_tried, attempt.lost_at, attempt.participants
    for begin in (attempt.publish_cursor, 0):  # from the start once more: a node may have been heard since
        for index in range(begin, len(nodes)):
            node = nodes[index]
            if node not in tried and node in heard and node not in lost_at:
                attempt.publish_cursor = index
                return False
    attempt.publish_cursor = len(nodes)
    return True
