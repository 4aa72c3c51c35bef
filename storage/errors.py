"""Every error that lastgood raises, in one tree.

    LastgoodError
    ├── UsageError                what you asked for cannot be done; nothing was touched
    │   ├── OptionsError          an option is unknown, malformed or unsafe (relative root, unknown key)
    │   ├── MembershipError       members are missing, doubled, or not those that were declared
    │   ├── EncodeError           a value in a state tree cannot be stored; names its path in the tree
    │   ├── NotACheckpointError   the path given to resume holds no committed checkpoint
    │   ├── WrongRunError         the checkpoint belongs to another run
    │   └── FingerprintError      the run changed since the checkpoint was written; shows both values
    ├── IntegrityError            bytes at rest are not what was committed (flipped, missing, truncated, swapped, extra)
    │   └── FormatVersionError    written by a format this version does not read
    ├── SaveFailedError           one attempt failed; the previous checkpoint stands
    ├── SnapshotError             a member could not copy its state into its images
    │   └── WindowClosedError     an optimizer update is under way; the save waits for its end
    ├── StagingError              the node's staging directory could not take the bytes
    ├── StoreError                the store answered with a failure
    │   ├── AlreadyExistsError    an exclusive create lost: somebody else's object stands there
    │   └── StoreUnavailableError the store could not be reached; the outcome of a write is unknown
    ├── ResumeError               no checkpoint could be restored; the message lists what was tried
    ├── DeadlineError             a wait ended; names who was late
    ├── FencedError               a newer coordinator has taken over; this one must stop
    └── IllegalMoveError          a defect of lastgood: the protocol was told something that cannot have happened

Every error pickles (errors cross Ray actors), carries its facts as fields, and ends with what to do.
"""

from __future__ import annotations

from typing import Any


class LastgoodError(Exception):
    """Base of every error of lastgood. `facts` are the keyword fields it was raised with."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        # Fields read as attributes (error.path, error.member); only called when normal lookup fails.
        facts = self.__dict__.get("facts") or {}
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {sorted(facts)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.facts))

    def __str__(self) -> str:
        return self.message


def _rebuild(kind: type[LastgoodError], message: str, facts: dict[str, Any]) -> LastgoodError:
    return kind(message, **facts)


class UsageError(LastgoodError):
    """What was asked for cannot be done; nothing was touched."""


class OptionsError(UsageError):
    """An option is unknown, malformed or unsafe."""


class MembershipError(UsageError):
    """Members are missing, doubled, or not those that were declared."""


class EncodeError(UsageError):
    """A value in a state tree cannot be stored. Field `path` is its place in the tree."""


class NotACheckpointError(UsageError):
    """A path given to resume holds no committed checkpoint."""


class WrongRunError(UsageError):
    """The checkpoint belongs to another run."""


class FingerprintError(UsageError):
    """The run changed since the checkpoint was written. Field `changes` maps a name to (saved, now)."""


class IntegrityError(LastgoodError):
    """Bytes at rest are not what was committed. Field `path` says where."""


class FormatVersionError(IntegrityError):
    """Written by a format version that this version of lastgood does not read."""


class SaveFailedError(LastgoodError):
    """One attempt failed and was cleaned; the previous checkpoint stands."""


class SnapshotError(LastgoodError):
    """A member could not copy its state into its images."""


class WindowClosedError(SnapshotError):
    """An optimizer update is under way, so no state of one step can be copied; the save waits for its end."""


class StagingError(LastgoodError):
    """A node's staging directory could not take the bytes."""


class StoreError(LastgoodError):
    """The store answered with a failure."""


class AlreadyExistsError(StoreError):
    """An exclusive create lost: somebody else's object stands there."""


class StoreUnavailableError(StoreError):
    """The store could not be reached, so the outcome of a write is unknown."""


class ResumeError(LastgoodError):
    """No checkpoint could be restored. The message lists what was tried and why it was rejected."""


class DeadlineError(LastgoodError):
    """A wait ended before what it waited for; names who was late."""


class FencedError(LastgoodError):
    """A newer coordinator has taken over the run; the holder of a lower epoch must stop."""


class IllegalMoveError(LastgoodError):
    """The protocol was told something that cannot have happened, or was about to do what it must not. Nothing changed.

    A defect of lastgood, never of the run. Fields: `attempt`, `phase`, `story`.
    """
