"""From a command and what came of it to the event that the core is told. Shared by the driver and the simulation.

The rule: an exception never decides anything. FencedError stops the core, WindowClosedError defers, every other one is
the command's *Failed event, whose outcome counts as unknown.
"""

from __future__ import annotations

from typing import Any

from ..storage.errors import FencedError, StagingError, WindowClosedError
from . import commands as cmd
from . import events as ev
from .messages import MemberId

# The command that an event answers.
ANSWERS: dict[type[ev.AttemptEvent], type[cmd.AttemptCommand]] = {
    ev.Paused: cmd.Pause,
    ev.PauseFailed: cmd.Pause,
    ev.SnapshotTaken: cmd.Snapshot,
    ev.SnapshotFailed: cmd.Snapshot,
    ev.SnapshotWindowClosed: cmd.Snapshot,
    ev.Released: cmd.Release,
    ev.ReleaseFailed: cmd.Release,
    ev.Staged: cmd.Stage,
    ev.StageFailed: cmd.Stage,
    ev.ManifestBuilt: cmd.BuildManifest,
    ev.ManifestFailed: cmd.BuildManifest,
    ev.Accepted: cmd.Accept,
    ev.AcceptFailed: cmd.Accept,
    ev.Refused: cmd.Refuse,
    ev.RefuseFailed: cmd.Refuse,
    ev.Published: cmd.Publish,
    ev.PublishFailed: cmd.Publish,
    ev.LedgerWritten: cmd.WriteLedger,
    ev.LedgerFailed: cmd.WriteLedger,
    ev.Uploaded: cmd.Upload,
    ev.UploadFailed: cmd.Upload,
    ev.CompletedRemotely: cmd.CompleteRemotely,
    ev.RemoteFailed: cmd.CompleteRemotely,
    ev.RemoteRefused: cmd.CompleteRemotely,
    ev.DurableNoted: cmd.NoteDurable,
    ev.NoteFailed: cmd.NoteDurable,
    ev.Discarded: cmd.Discard,
    ev.DiscardFailed: cmd.Discard,
}
RETRIED = frozenset(
    {
        ev.ReleaseFailed,
        ev.AcceptFailed,
        ev.RefuseFailed,
        ev.PublishFailed,
        ev.LedgerFailed,
        ev.UploadFailed,
        ev.RemoteFailed,
        ev.NoteFailed,
        ev.DiscardFailed,
    }
)

_FAILURES: dict[type[cmd.AttemptCommand], type[ev.NodeFailure]] = {
    cmd.Pause: ev.PauseFailed,
    cmd.Snapshot: ev.SnapshotFailed,
    cmd.Release: ev.ReleaseFailed,
    cmd.Stage: ev.StageFailed,
    cmd.Refuse: ev.RefuseFailed,
    cmd.Publish: ev.PublishFailed,
    cmd.Upload: ev.UploadFailed,
    cmd.NoteDurable: ev.NoteFailed,
    cmd.Discard: ev.DiscardFailed,
}
_DONE: dict[type[cmd.AttemptCommand], type[ev.NodeEvent]] = {
    cmd.Pause: ev.Paused,
    cmd.Release: ev.Released,
    cmd.Publish: ev.Published,
    cmd.Upload: ev.Uploaded,
    cmd.NoteDurable: ev.DurableNoted,
    cmd.Discard: ev.Discarded,
}


def success(command: cmd.AttemptCommand, result: Any) -> ev.Event:
    """The event for a command that was answered with `result`."""
    kind, attempt = type(command), command.head.attempt
    if isinstance(command, cmd.NodeCommand):
        node = command.node
        if kind in _DONE:
            return _DONE[kind](attempt, node)
        if kind is cmd.Snapshot:
            return ev.SnapshotTaken(attempt, node, result)
        if kind is cmd.Stage:
            return ev.Staged(attempt, node, tuple(result))
        return (ev.Accepted if kind is cmd.Accept else ev.Refused)(attempt, node, result)
    if kind is cmd.BuildManifest:
        return ev.ManifestBuilt(attempt, result)
    return ev.LedgerWritten(attempt) if kind is cmd.WriteLedger else ev.CompletedRemotely(attempt)


def failure(command: cmd.AttemptCommand, error: BaseException) -> ev.Event:
    """The event for a command that raised. Fields `member` and `missing` of the error are taken over."""
    attempt = command.head.attempt
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, FencedError):
        return ev.Fenced(str(error))
    if isinstance(command, cmd.BuildManifest):
        return ev.ManifestFailed(attempt, reason)
    if isinstance(command, cmd.WriteLedger):
        return ev.LedgerFailed(attempt, reason)
    if isinstance(command, cmd.CompleteRemotely):
        facts = getattr(error, "facts", {})
        if facts.get("collected"):
            return ev.RemoteRefused(attempt, reason)
        return ev.RemoteFailed(attempt, reason, tuple(facts.get("missing_nodes", ())))
    assert isinstance(command, cmd.NodeCommand)
    member = member_of(error)
    if isinstance(command, cmd.Accept):
        known = isinstance(error, StagingError) and error.facts.get("errno") is not None
        return ev.AcceptFailed(attempt, command.node, reason, member, known)
    if isinstance(command, cmd.Snapshot) and isinstance(error, WindowClosedError):
        return ev.SnapshotWindowClosed(attempt, command.node, reason, member)
    return _FAILURES[type(command)](attempt, command.node, reason, member)


def member_of(error: BaseException) -> MemberId | None:
    """The member that an error blames, if it names one."""
    value = getattr(error, "facts", {}).get("member")
    if isinstance(value, MemberId):
        return value
    if isinstance(value, str) and value.rpartition(":")[2].isdigit():
        role, _, rank = value.rpartition(":")
        return MemberId(role, int(rank))
    return None
