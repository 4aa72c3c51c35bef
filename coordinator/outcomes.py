"""What the driver answers: how a save, a window and a drain came out. Plain frozen dataclasses; they cross actors.

A failure is an outcome here, never an exception: the caller decides whether training goes on (`stop`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .messages import Blame, SaveKind, SaveState

LADDER = tuple(state for state in SaveState if state is not SaveState.ABORTED)
COMMITTED_OR_BEYOND = (SaveState.COMMITTED, SaveState.UPLOADING, SaveState.DURABLE)


def reached(state: SaveState, wanted: SaveState) -> bool:
    """Whether `state` is at or beyond `wanted` on the ladder; ABORTED is beyond nothing."""
    return state is not SaveState.ABORTED and LADDER.index(state) >= LADDER.index(wanted)


@dataclass(frozen=True)
class SaveOutcome:
    """How far one request has come. `attempt` and what names it are None while the request waits for a window."""

    request_id: str
    state: SaveState
    attempt: str | None = None
    step: int | None = None
    epoch: int | None = None
    sequence: int | None = None
    kind: SaveKind = SaveKind.MANUAL
    tag: str | None = None
    blame: Blame | None = None  # why it failed, or why it is in doubt
    waits_for: str | None = None  # a sentence, while the request is deferred
    in_doubt: bool = False  # its deadline passed with every heard record at accept: it may still turn out committed
    stop: bool = False  # on_failure says that training must stop
    stall_s: float = 0.0  # longest copy of any node, in seconds
    story: tuple[tuple[float, str], ...] = ()  # (coordinator's monotonic seconds, sentence)

    @property
    def committed(self) -> bool:
        """Whether every participant's record says accept, and that was told."""
        return self.state in COMMITTED_OR_BEYOND and not self.in_doubt

    @property
    def failed(self) -> bool:
        """Whether it will come no further as far as can be known now."""
        return self.state is SaveState.ABORTED or self.in_doubt


@dataclass(frozen=True)
class WindowOutcome:
    """What open_window came to: the window is open, and what was due has been copied or has failed."""

    step: int
    opened: bool
    blame: Blame | None = None  # why the window was not opened
    saves: tuple[SaveOutcome, ...] = ()  # of the requests that this window served (scheduled, and those that waited)
    stop: bool = False  # on_failure says that training must stop


@dataclass(frozen=True)
class DrainOutcome:
    """Whether everything committed is durable; if not, one sentence for each thing that lags."""

    drained: bool
    lagging: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class StepOutcome:
    """What end_step came to. `saving` is the attempt that saves this step, if one does; `saved` the same if its copy is
    whole already: an overlapped one has only begun, and should it fail, the next end_step tells."""

    step: int
    reason: str  # why it was saved or not, a sentence
    saving: str | None = None
    saved: str | None = None
    stall_s: float = 0.0  # seconds that the marks and copies took, at the coordinator
    failures: tuple[str, ...] = ()  # what failed since the last end_step; training may go on unless `stop`
    stop: bool = False
    newest: tuple[int, int] = (0, 0)  # (epoch, sequence) of the newest checkpoint known now
    in_memory: bool = False  # a snapshot of this step lies whole in memory
    alarms: tuple[str, ...] = ()  # what is wrong with the run though its saves succeed; since the last end_step


@dataclass(frozen=True)
class Missing:
    """What the coordinator still waits for before the run is complete; empty when it is."""

    members: tuple[str, ...] = ()
    why: tuple[str, ...] = ()  # what stagers that did not answer have raised, sentences
