"""What each answer of a participant or the store means for its attempt, phase by phase.

Part of the protocol core (as pure as protocol.py). The rule: a handler is called only in a phase in which its event is
expected (moves.EXPECTED); it notes facts, and moves the attempt when the last vote of a phase is in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from . import commands as cmd
from . import events as ev
from .attempt import Attempt
from .messages import Blame, RecordState, SaveKind, SaveState
from .moves import Cause, Phase
from .votes import check_shards, check_snapshot

if TYPE_CHECKING:
    from .protocol import Protocol


class Progress:
    """The handlers of attempts' events of one Protocol."""

    def __init__(self, core: Protocol) -> None:
        self._core = core

    def paused(self, attempt: Attempt, event: ev.Paused) -> None:
        attempt.paused.add(event.node)
        assert attempt.roster is not None
        pausing = attempt.roster.pausing
        if len(attempt.paused) >= len(pausing) and attempt.paused >= pausing:
            attempt.move(Cause.ALL_PAUSED, self._core.now_s, f"{len(attempt.paused)} nodes stand still")
            attempt.phase_deadline_s = self._core.now_s + self._core.settings.deadlines.snapshot_s

    def snapshot_taken(self, attempt: Attempt, event: ev.SnapshotTaken) -> None:
        if blame := check_snapshot(attempt, event.node, event.snapshot):
            self._core.fail(attempt, self._waited(attempt, blame))
            return
        attempt.snapshots[event.node] = event.snapshot
        attempt.updates.update({report.member: report.updates for report in event.snapshot.members})
        attempt.stall_s = max(attempt.stall_s, event.snapshot.stall_s)
        attempt.tell(self._core.now_s, f"{event.node} copied {len(event.snapshot.members)} members")
        if len(attempt.snapshots) == len(attempt.participants):
            if attempt.kind is SaveKind.MEMORY:
                self._core.memory.hold(attempt)
                return
            self._core.memory.supersede(attempt)
            attempt.move(Cause.ALL_COPIED, self._core.now_s, "every copy is whole")
            attempt.phase_deadline_s = self._core.now_s + self._core.settings.deadlines.stage_s
            self._core.announce(attempt, SaveState.SNAPSHOT)

    def snapshot_window_closed(self, attempt: Attempt, event: ev.SnapshotWindowClosed) -> None:
        self._core.requests.window_was_closed(attempt, f"{event.node}: {event.reason}")

    def released(self, attempt: Attempt, event: ev.Released) -> None:
        attempt.to_release.discard(event.node)

    def staged(self, attempt: Attempt, event: ev.Staged) -> None:
        if blame := check_shards(attempt, event.node, event.shards):
            self._core.fail(attempt, self._waited(attempt, blame))
            return
        attempt.shards[event.node] = event.shards
        attempt.tell(self._core.now_s, f"{event.node} staged {len(event.shards)} shards")
        if len(attempt.shards) == len(attempt.participants):
            for sentence in self._core.standstill.look(attempt):
                self._core.say(cmd.Alarm(attempt.head, sentence))
            attempt.move(Cause.ALL_STAGED, self._core.now_s, "every member x component is on disk")
            attempt.phase_deadline_s = self._core.now_s + self._core.settings.deadlines.accept_s
            self._core.announce(attempt, SaveState.STAGED)

    def manifest_built(self, attempt: Attempt, event: ev.ManifestBuilt) -> None:
        attempt.manifest = event.manifest

    def manifest_failed(self, attempt: Attempt, event: ev.ManifestFailed) -> None:
        blame = Blame(attempt.phase.value, f"the votes do not make a manifest: {event.reason}")
        self._core.fail(attempt, self._waited(attempt, blame))

    def _waited(self, attempt: Attempt, blame: Blame) -> Blame:
        return replace(blame, waited_s=self._core.now_s - attempt.started_s)

    def call_failed(self, attempt: Attempt, event: ev.NodeFailure) -> None:
        waited_s = self._core.now_s - attempt.started_s
        blame = Blame(attempt.phase.value, event.reason, event.node, event.member, waited_s)
        if attempt.phase is Phase.STAGING:
            self._core.memory.keep_or_fail(attempt, blame)
        else:
            self._core.fail(attempt, blame)

    def accept_failed(self, attempt: Attempt, event: ev.AcceptFailed) -> None:
        """A disk that says why it takes no record will say so again: refusing is asked for at once, which tells all."""
        if event.known:
            self.call_failed(attempt, event)

    def accepted(self, attempt: Attempt, event: ev.Accepted) -> None:
        self._core.learn_record(attempt, event.node, event.record)
        if attempt.phase is not Phase.ACCEPTING:
            self._core.judge(attempt)
        elif event.record is not RecordState.ACCEPT:
            what = "has refused it" if event.record is RecordState.REFUSE else "no longer has what it staged"
            waited_s = self._core.now_s - attempt.started_s
            self._core.fail(attempt, Blame(attempt.phase.value, f"{event.node} {what}", event.node, waited_s=waited_s))
        elif self._core.is_committed(attempt):
            self._core.commit(attempt, Cause.ALL_ACCEPT, "the last record says accept")

    def refused(self, attempt: Attempt, event: ev.Refused) -> None:
        self._core.learn_record(attempt, event.node, event.record)
        self._core.judge(attempt)

    def published(self, attempt: Attempt, event: ev.Published) -> None:
        attempt.published.add(event.node)
        attempt.publish_tried.add(event.node)
        if attempt.proof is None:
            attempt.proof = f"COMPLETED stands at {event.node}"

    def publish_failed(self, attempt: Attempt, event: ev.PublishFailed) -> None:
        attempt.publish_tried.add(event.node)

    def ledger_written(self, attempt: Attempt, event: ev.LedgerWritten) -> None:
        attempt.ledger_tried = attempt.ledger_written = True

    def ledger_failed(self, attempt: Attempt, event: ev.LedgerFailed) -> None:
        attempt.ledger_tried = True

    def uploaded(self, attempt: Attempt, event: ev.Uploaded) -> None:
        attempt.uploaded.add(event.node)

    def upload_failed(self, attempt: Attempt, event: ev.UploadFailed) -> None:
        self._core.hold_up(attempt, f"{event.node}: {event.reason}")

    def remote_failed(self, attempt: Attempt, event: ev.RemoteFailed) -> None:
        attempt.uploaded.difference_update(event.missing)
        self._core.hold_up(attempt, event.reason)

    def completed_remotely(self, attempt: Attempt, event: ev.CompletedRemotely) -> None:
        attempt.in_store = True

    def remote_refused(self, attempt: Attempt, event: ev.RemoteRefused) -> None:
        attempt.given_up = event.reason
        self._core.hold_up(attempt, event.reason)

    def durable_noted(self, attempt: Attempt, event: ev.DurableNoted) -> None:
        attempt.noted.add(event.node)

    def discarded(self, attempt: Attempt, event: ev.Discarded) -> None:
        attempt.discarded.add(event.node)
