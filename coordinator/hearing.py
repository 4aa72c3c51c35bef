"""Nodes and members: who was heard, who was lost, and what their disks say of attempts.

Part of the protocol core (as pure as protocol.py). The rule: an inventory that answers hello is fenced (no lower epoch
can change it any more), so what it says may decide; a node that is not heard decides nothing and is waited for.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from . import commands as cmd
from . import events as ev
from .attempt import CERTAIN, OUTSTANDING, Attempt
from .messages import AttemptHead, AttemptInventory, Blame, Inventory, RecordState
from .moves import COPYING, PROVEN, Cause, Phase

if TYPE_CHECKING:
    from .protocol import Protocol


_NODE_CALLS = (
    cmd.Pause,
    cmd.Snapshot,
    cmd.Release,
    cmd.Stage,
    cmd.Accept,
    cmd.Refuse,
    cmd.Publish,
    cmd.Upload,
    cmd.NoteDurable,
    cmd.Discard,
)


class Hearing:
    """What one Protocol learns of nodes, members and the store."""

    def __init__(self, core: Protocol) -> None:
        self._core = core
        self._proofs: dict[str, tuple[str, bool]] = {}  # attempt -> (where seen, in the store), from the survey
        self._contradicting: set[tuple[str, str]] = set()  # node, attempt: told of

    def members_changed(self, event: ev.MembersChanged) -> None:
        core = self._core
        for member in core.membership.register(event.node, event.members):
            self._member_gone(event.node, ev.MemberDropped(member, "its process was replaced or gave up its place"))

    def member_dropped(self, event: ev.MemberDropped) -> None:
        core = self._core
        node = core.membership.drop(event.member)
        if node is not None:
            self._member_gone(node, event)

    def _member_gone(self, node: str, event: ev.MemberDropped) -> None:
        core = self._core
        held = core.memory.held
        if held is not None and held.roster is not None and event.member in held.roster.processes:
            core.memory.lose_member(f"member {event.member} is gone: {event.reason}")
        attempt = core.foreground
        if attempt is None or attempt.phase not in COPYING or node in attempt.snapshots or attempt.origin is not None:
            return
        assert attempt.roster is not None
        if event.member in attempt.roster.members_of.get(node, ()):
            reason = f"member {event.member} is gone before its copy was done: {event.reason}"
            waited_s = core.now_s - attempt.started_s
            core.fail(attempt, Blame(attempt.phase.value, reason, node, event.member, waited_s))

    def node_lost(self, event: ev.NodeLost) -> None:
        core = self._core
        node = event.node
        if core.heard.pop(node, None) is None:
            return
        if node in core.expected:
            core.unheard.add(node)
        for attempt in list(core.active.values()):
            if not attempt.has(node):
                continue
            self._forget_calls(attempt, node)
            attempt.tell(core.now_s, f"{node} is lost: {event.reason}")
            phase = attempt.phase
            reason = f"the stager of {node} was lost: {event.reason}"
            if phase in COPYING and node not in attempt.snapshots:
                self._fail(attempt, reason, node)
            elif phase is Phase.STAGING and node not in attempt.shards:  # its images are there when it is only silent
                core.memory.keep_or_fail(attempt, self._blame(attempt, reason, node))
            elif phase is Phase.UPLOADING and node not in attempt.uploaded:
                core.hold_up(attempt, f"{node} is lost: {event.reason}")
            elif phase in (Phase.ABORTING, Phase.IN_DOUBT):
                core.judge(attempt)

    def _forget_calls(self, attempt: Attempt, node: str, *, failed_only: bool = False) -> None:
        """What was asked of the node may be asked anew. `failed_only`: calls that are still out will be answered."""
        for kind in _NODE_CALLS:
            when = attempt.calls.get((kind, node))
            if when is None or (failed_only and when == OUTSTANDING):
                continue
            del attempt.calls[kind, node]
            attempt.tries.pop((kind, node), None)

    def check_inventory(self, inventory: Inventory) -> None:
        """What no honest disk can say. Raises IllegalMoveError before anything is changed."""
        core = self._core
        for found in inventory.attempts:
            attempt = core.attempts.get(found.attempt)
            if attempt is None:
                continue
            if found.head != attempt.head:
                continue  # its file is damaged: node_heard makes nothing of it
            if found.completed and (attempt.refused or attempt.phase is Phase.ABORTED):
                raise attempt.illegal(f"COMPLETED stands at {inventory.node}, though the attempt was refused")
            known = attempt.records.get(inventory.node)
            if known in CERTAIN and found.record in CERTAIN and known is not found.record:
                raise attempt.illegal(f"the write-once record of {inventory.node} changed to {found.record.value}")
            if found.record is RecordState.REFUSE and attempt.phase in PROVEN:
                raise attempt.illegal(f"{inventory.node} holds a refuse, though the attempt is committed")

    def _agreed(self, node: str, found: AttemptInventory) -> AttemptInventory:
        """What a node says of an attempt; when it gives it another place in the order, only that something lies there.

        That costs the node its word on this attempt, and nothing else. It counts as a record that cannot be read: never
        as an accept, and never as gone, so the write-once record is asked for again before anything is decided.
        """
        core = self._core
        attempt = core.attempts.get(found.attempt)
        if attempt is None or found.head == attempt.head:
            return found
        if (node, attempt.id) not in self._contradicting:
            self._contradicting.add((node, attempt.id))
            sentence = (
                f"{node} holds attempt {attempt.id} as {_place(found.head)}, and others hold it as "
                f"{_place(attempt.head)}: a file there is damaged, and what it tells of this attempt is not used"
            )
            attempt.tell(core.now_s, sentence)
            core.say(cmd.Alarm(attempt.head, sentence))
        return AttemptInventory(
            attempt.id,
            attempt.head.step,
            *attempt.order,
            record=RecordState.UNKNOWN,
            staged=True,
            completed=False,
            durable=False,
            participants=(),
        )

    def node_heard(self, event: ev.NodeHeard) -> None:
        core = self._core
        node = event.inventory.node
        attempts = tuple(self._agreed(node, found) for found in event.inventory.attempts)
        inventory = dataclasses.replace(event.inventory, attempts=attempts)
        if inventory.highest_epoch > core.settings.epoch:
            reason = f"{node} has seen epoch {inventory.highest_epoch}, this coordinator is {core.settings.epoch}"
            core.stop_for_good(reason)
            return
        for found in inventory.attempts:
            if found.epoch >= core.settings.epoch and found.attempt not in core.own_ids:
                core.stop_for_good(f"{node} holds attempt {found.attempt} of epoch {found.epoch}, made by another")
                return
        restarted = core.incarnations.get(node) not in (None, inventory.incarnation)
        core.heard[node] = core.incarnations[node] = inventory.incarnation
        if node in core.unheard:
            core.unheard.discard(node)
            if not core.unheard:  # attempts without known participants can be judged now
                for attempt in core.active.values():
                    attempt.look()
        self.members_changed(ev.MembersChanged(node, inventory.members))
        core.membership.learn(inventory.declarations)
        here = {found.attempt: found for found in inventory.attempts}
        for found in inventory.attempts:
            core.highest_sequence = max(core.highest_sequence, found.sequence)
            if found.attempt not in core.attempts and found.attempt not in core.own_ids:
                self._find(found, node)
        for attempt in list(core.attempts.values()):
            found = here.get(attempt.id)
            if found is None and attempt.phase is Phase.DURABLE and attempt.id not in core.active:
                continue  # it has gone as it should, or will never be asked for again
            if found is not None or attempt.has(node):
                self._hear_of(attempt, node, found, restarted, event.asked_s)

    def _find(self, found: AttemptInventory, node: str) -> None:
        core = self._core
        head = found.head
        attempt = core.attempt_type(head, mine=False, participants=(), participants_known=False, phase=Phase.FOUND)
        attempt.tell(core.now_s, f"found on {node}, record {found.record.value}")
        core.attempts[head.attempt] = core.active[head.attempt] = attempt
        if head.attempt in self._proofs:
            attempt.proof, attempt.in_store = self._proofs[head.attempt]
            attempt.ledger_written = True

    def _hear_of(
        self, attempt: Attempt, node: str, found: AttemptInventory | None, restarted: bool, asked_s: float
    ) -> None:
        """Works in what a node that was just heard says of an attempt (None: it does not know it)."""
        core = self._core
        self._forget_calls(attempt, node, failed_only=not restarted)
        if not attempt.participants_known:
            if found is not None and found.participants:
                attempt.participants, attempt.participants_known = tuple(sorted(found.participants)), True
                attempt.look()
            elif not attempt.has(node):
                attempt.participants = tuple(sorted((*attempt.participants, node)))
                attempt.look()
        gone = found is None or (found.record is RecordState.UNKNOWN and not found.staged and not found.completed)
        if gone:
            if asked_s > attempt.told_s.get(node, -math.inf):
                self._gone_from(attempt, node, restarted)
        else:
            assert found is not None
            core.learn_record(attempt, node, found.record)
            if found.held is not None and attempt.phase is Phase.FOUND:
                attempt.held_at[node] = found.held
            if found.manifest is not None and attempt.manifest is None and not attempt.finished:
                attempt.manifest = found.manifest
                attempt.look()
            if found.completed:
                attempt.published.add(node)
                attempt.publish_tried.add(node)
                attempt.proof = attempt.proof or f"COMPLETED stands at {node}"
            if found.durable:
                attempt.in_store = True
                attempt.noted.add(node)
        self._reconsider(attempt, node, found, restarted)

    def _gone_from(self, attempt: Attempt, node: str, restarted: bool) -> None:
        core = self._core
        known = attempt.records.get(node)
        if known is None or known is RecordState.NONE:
            attempt.note_record(node, RecordState.UNKNOWN)
        elif restarted and known in CERTAIN and not attempt.aborted:
            attempt.note_record(node, RecordState.UNKNOWN)
            attempt.tell(core.now_s, f"{node} came back without its record: its disk was lost")
        if attempt.phase in PROVEN and (restarted or not attempt.mine) and not attempt.finished:
            attempt.lost_at.add(node)
            attempt.published.discard(node)
            if attempt.phase is Phase.UPLOADING:
                core.hold_up(attempt, f"{node} came back without its shards")

    def _reconsider(self, attempt: Attempt, node: str, found: AttemptInventory | None, restarted: bool) -> None:
        core = self._core
        phase = attempt.phase
        if phase is Phase.ABORTED and found is not None and (found.staged or node not in attempt.discarded):
            attempt.discarded.discard(node)
            attempt.move(Cause.SEEN_AGAIN, core.now_s, f"{node} still holds it")
            core.active[attempt.id] = attempt
        if attempt.phase in (Phase.FOUND, Phase.IN_DOUBT, Phase.ABORTING):
            core.judge(attempt)
        elif phase is Phase.ACCEPTING:
            staged_here = found is not None and found.staged
            if restarted and not staged_here:
                self._fail(attempt, f"{node} came back without what it staged", node)
            elif core.is_committed(attempt):
                core.commit(attempt, Cause.ALL_ACCEPT, f"{node} was heard again with its accept")
            elif attempt.refused:
                self._fail(attempt, f"{node} has refused it", node)
        elif phase is Phase.STAGING and restarted:
            staged_here = found is not None and found.staged
            if not (node in attempt.shards and staged_here):
                self._fail(attempt, f"the stager of {node} restarted: its images are gone", node)
        elif phase is Phase.HELD and restarted:
            core.memory.drop(f"the stager of {node} restarted")
        elif phase in COPYING and restarted:
            self._fail(attempt, f"the stager of {node} restarted: its images are gone", node)

    def _fail(self, attempt: Attempt, reason: str, node: str) -> None:
        self._core.fail(attempt, self._blame(attempt, reason, node))

    def _blame(self, attempt: Attempt, reason: str, node: str) -> Blame:
        return Blame(attempt.phase.value, reason, node, waited_s=self._core.now_s - attempt.started_s)

    def store_surveyed(self, event: ev.StoreSurveyed) -> None:
        core = self._core
        for heads, where, in_store in (
            (event.ledger, "a ledger entry in the store names it", False),
            (event.completed, "COMPLETED stands in the store", True),
        ):
            for head in heads:
                core.highest_sequence = max(core.highest_sequence, head.sequence)
                self._proofs[head.attempt] = (where, in_store)
                attempt = core.attempts.get(head.attempt)
                if attempt is None or attempt.refused:
                    continue
                attempt.proof = attempt.proof or where
                attempt.in_store = attempt.in_store or in_store
                attempt.ledger_written = True
                if attempt.phase in (Phase.FOUND, Phase.IN_DOUBT, Phase.ABORTING):
                    core.judge(attempt)

    def recovery_begun(self, event: ev.RecoveryBegun) -> None:
        core = self._core
        core.expected = event.expected
        core.unheard = set(event.expected - core.heard.keys())
        core.recovering = False
        found = sorted((a for a in core.active.values() if a.phase is Phase.FOUND), key=lambda a: a.order)
        for attempt in found:
            if not attempt.held_at or attempt.proof is not None or attempt.all_accept:
                core.judge(attempt)
        core.memory.adopt([attempt for attempt in found if attempt.phase is Phase.FOUND], event.wall_s)


def _place(head: AttemptHead) -> str:
    return f"step {head.step}, epoch {head.epoch}, sequence {head.sequence}"
