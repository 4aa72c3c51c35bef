"""The moves of an attempt, as two tables; the diagram in docs/protocol.md is generated from them.

Two rules that the core obeys: (1) `Attempt.move` is the one door for a change of phase, and it takes only what stands
in MOVES; (2) an event that may not arrive in the attempt's phase (EXPECTED) raises IllegalMoveError with the attempt's
story before anything has changed. An answer that merely comes late is expected, and changes nothing.
"""

from __future__ import annotations

import enum

from . import events as ev


class Phase(enum.Enum):
    """Where an attempt stands. HELD: it lies in memory, whole, and is staged only when it is needed. FOUND, IN_DOUBT:
    attempts of an earlier coordinator, or whose outcome is not known."""

    REQUESTED = "requested"
    PAUSING = "pausing"
    SNAPSHOTTING = "snapshotting"
    HELD = "held"
    STAGING = "staging"
    ACCEPTING = "accepting"
    COMMITTED = "committed"
    UPLOADING = "uploading"
    DURABLE = "durable"
    FOUND = "found"
    IN_DOUBT = "in_doubt"
    ABORTING = "aborting"
    ABORTED = "aborted"

    __hash__ = object.__hash__  # members are singletons; identity is the fast hash


class Cause(enum.Enum):
    """Why an attempt moves."""

    PAUSE_ASKED = "a component asks for pause"
    NOTHING_TO_PAUSE = "nothing to pause"
    ALL_PAUSED = "every node paused"
    ALL_COPIED = "every node's snapshot vote"
    ALL_HELD = "every node's snapshot vote, and nobody asks for more"
    WANTED = "a process died, or somebody asks for it"
    KEPT = "staging failed: it stays in memory"
    SUPERSEDED = "a newer snapshot is whole, or it is of no use any more"
    ALL_STAGED = "every node's staging vote"
    ALL_ACCEPT = "every record says accept"
    PROOF = "COMPLETED or a ledger entry found"
    WINDOW_CLOSED = "an update had begun: the request waits for its end"
    FAILED = "failure, refusal or deadline"
    UPLOAD = "its turn to upload"
    UPLOAD_HELD_UP = "upload failed: retried later"
    IN_STORE = "the store's COMPLETED stands"
    REFUSAL = "a record says refuse, or a heard node has none"
    UNHEARD = "all heard accept, one is unheard"
    CLEAN = "every node is clean"
    SEEN_AGAIN = "a node heard later still holds it"

    __hash__ = object.__hash__


MOVES: dict[tuple[Phase, Cause], Phase] = {
    (Phase.REQUESTED, Cause.PAUSE_ASKED): Phase.PAUSING,
    (Phase.REQUESTED, Cause.NOTHING_TO_PAUSE): Phase.SNAPSHOTTING,
    (Phase.PAUSING, Cause.ALL_PAUSED): Phase.SNAPSHOTTING,
    (Phase.SNAPSHOTTING, Cause.ALL_COPIED): Phase.STAGING,
    (Phase.SNAPSHOTTING, Cause.ALL_HELD): Phase.HELD,
    (Phase.HELD, Cause.WANTED): Phase.STAGING,
    (Phase.HELD, Cause.SUPERSEDED): Phase.ABORTING,
    (Phase.STAGING, Cause.ALL_STAGED): Phase.ACCEPTING,
    (Phase.STAGING, Cause.KEPT): Phase.HELD,
    (Phase.ACCEPTING, Cause.ALL_ACCEPT): Phase.COMMITTED,
    (Phase.COMMITTED, Cause.UPLOAD): Phase.UPLOADING,
    (Phase.UPLOADING, Cause.UPLOAD_HELD_UP): Phase.COMMITTED,
    (Phase.UPLOADING, Cause.IN_STORE): Phase.DURABLE,
    (Phase.COMMITTED, Cause.IN_STORE): Phase.DURABLE,  # found there, or the answer came late
    (Phase.PAUSING, Cause.WINDOW_CLOSED): Phase.ABORTING,
    (Phase.SNAPSHOTTING, Cause.WINDOW_CLOSED): Phase.ABORTING,
    (Phase.PAUSING, Cause.FAILED): Phase.ABORTING,
    (Phase.SNAPSHOTTING, Cause.FAILED): Phase.ABORTING,
    (Phase.STAGING, Cause.FAILED): Phase.ABORTING,
    (Phase.ACCEPTING, Cause.FAILED): Phase.ABORTING,
    (Phase.ABORTING, Cause.ALL_ACCEPT): Phase.COMMITTED,  # refusing found that every accept had landed
    (Phase.ABORTING, Cause.PROOF): Phase.COMMITTED,
    (Phase.ABORTING, Cause.UNHEARD): Phase.IN_DOUBT,
    (Phase.ABORTING, Cause.CLEAN): Phase.ABORTED,
    (Phase.FOUND, Cause.PROOF): Phase.COMMITTED,
    (Phase.FOUND, Cause.ALL_ACCEPT): Phase.COMMITTED,
    (Phase.FOUND, Cause.REFUSAL): Phase.ABORTING,
    (Phase.FOUND, Cause.UNHEARD): Phase.IN_DOUBT,
    (Phase.IN_DOUBT, Cause.PROOF): Phase.COMMITTED,
    (Phase.IN_DOUBT, Cause.ALL_ACCEPT): Phase.COMMITTED,
    (Phase.IN_DOUBT, Cause.REFUSAL): Phase.ABORTING,
    (Phase.ABORTED, Cause.SEEN_AGAIN): Phase.ABORTING,
}

# Phases in which an own attempt holds the foreground (COMMITTED does too, until it has been announced).
BEFORE_COMMIT = (Phase.REQUESTED, Phase.PAUSING, Phase.SNAPSHOTTING, Phase.STAGING, Phase.ACCEPTING)
COPYING = (Phase.REQUESTED, Phase.PAUSING, Phase.SNAPSHOTTING)
PROVEN = (Phase.COMMITTED, Phase.UPLOADING, Phase.DURABLE)
UNDONE = (Phase.ABORTING, Phase.IN_DOUBT, Phase.ABORTED)

_AFTER_PAUSING = (Phase.SNAPSHOTTING, Phase.HELD, Phase.STAGING, Phase.ACCEPTING, *PROVEN, *UNDONE)
_AFTER_COPY = (Phase.HELD, Phase.STAGING, Phase.ACCEPTING, *PROVEN, *UNDONE)
_AFTER_STAGING = (Phase.HELD, Phase.ACCEPTING, *PROVEN, *UNDONE)  # HELD: after another node's failure

# event -> (phases in which it is worked on, phases in which it is late: noted in the story, changes nothing)
WHEN: dict[type[ev.AttemptEvent], tuple[tuple[Phase, ...], tuple[Phase, ...]]] = {
    ev.Paused: ((Phase.PAUSING,), _AFTER_PAUSING),
    ev.PauseFailed: ((Phase.PAUSING,), _AFTER_PAUSING),
    ev.SnapshotTaken: ((Phase.SNAPSHOTTING,), _AFTER_COPY),
    ev.SnapshotFailed: ((Phase.SNAPSHOTTING,), _AFTER_COPY),
    ev.SnapshotWindowClosed: ((Phase.SNAPSHOTTING,), _AFTER_COPY),
    ev.Released: (_AFTER_COPY, ()),
    ev.ReleaseFailed: (_AFTER_COPY, ()),
    ev.Staged: ((Phase.STAGING,), _AFTER_STAGING),
    ev.StageFailed: ((Phase.STAGING,), _AFTER_STAGING),
    ev.ManifestBuilt: ((Phase.ACCEPTING,), UNDONE + PROVEN),
    ev.ManifestFailed: ((Phase.ACCEPTING,), UNDONE + PROVEN),
    ev.Accepted: ((Phase.ACCEPTING, Phase.ABORTING, Phase.IN_DOUBT), (*PROVEN, Phase.ABORTED)),
    ev.AcceptFailed: ((Phase.ACCEPTING,), PROVEN + UNDONE),
    ev.Refused: ((Phase.ABORTING, Phase.IN_DOUBT), (*PROVEN, Phase.ABORTED)),
    ev.RefuseFailed: ((Phase.ABORTING, Phase.IN_DOUBT), (*PROVEN, Phase.ABORTED)),
    ev.Published: (PROVEN, ()),
    ev.PublishFailed: (PROVEN, ()),
    ev.LedgerWritten: (PROVEN, ()),
    ev.LedgerFailed: (PROVEN, ()),
    ev.Uploaded: ((Phase.UPLOADING, Phase.COMMITTED), (Phase.DURABLE,)),
    ev.UploadFailed: ((Phase.UPLOADING, Phase.COMMITTED), (Phase.DURABLE,)),
    ev.CompletedRemotely: ((Phase.UPLOADING, Phase.COMMITTED), (Phase.DURABLE,)),
    ev.RemoteFailed: ((Phase.UPLOADING, Phase.COMMITTED), (Phase.DURABLE,)),
    ev.RemoteRefused: ((Phase.UPLOADING, Phase.COMMITTED), (Phase.DURABLE,)),
    ev.DurableNoted: ((Phase.DURABLE,), ()),
    ev.NoteFailed: ((Phase.DURABLE,), ()),
    ev.Discarded: ((Phase.ABORTING,), (Phase.ABORTED,)),
    ev.DiscardFailed: ((Phase.ABORTING,), (Phase.ABORTED,)),
}

LATE = "late"
WORK = "work"

# (phase, event kind) -> WORK or LATE; a pair that is not in here is an illegal move.
EXPECTED: dict[tuple[Phase, type[ev.AttemptEvent]], str] = {
    **{(phase, kind): LATE for kind, (_, late) in WHEN.items() for phase in late},
    **{(phase, kind): WORK for kind, (work, _) in WHEN.items() for phase in work},
}
