"""What the protocol core and its driver are told at the start. Frozen; nothing is read from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..storage.errors import OptionsError


@dataclass(frozen=True)
class Deadlines:
    """Seconds. Each covers what its comment says; the whole save is bounded by the request's deadline or save_s."""

    save_s: float = 900.0  # from the request to the commit, for requests that name no deadline of their own
    pause_s: float = 30.0  # until every node has paused what asks for it
    snapshot_s: float = 120.0  # until every node's snapshot vote
    stage_s: float = 600.0  # until every node's staging vote
    accept_s: float = 30.0  # until every record; then until an unknown outcome is told as in doubt
    mark_s: float = 30.0  # a mark or the closing of a window, at every node
    call_s: float = 10.0  # any other single call to a stager
    ledger_s: float = 5.0  # one try to write the ledger entry; the announcement of a commit waits no longer for it
    upload_s: float = 3600.0  # one try of one node to upload its shards
    remote_s: float = 300.0  # one try to verify all objects and write COMPLETED in the store

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise OptionsError(f"deadline {name} is {value}: use seconds above 0.", name=name, value=value)


@dataclass(frozen=True)
class Settings:
    """Of one incarnation of the coordinator."""

    run: str
    epoch: int  # allocated by the caller; no other coordinator of the run ever has it
    deadlines: Deadlines = field(default_factory=Deadlines)
    on_failure: str = "continue"  # or "abort": the first failed save stops training
    max_consecutive_failures: int = 3  # this many failed saves in a row stop training
    overlapped: bool = False  # training goes on while the state is copied; its next update waits
    in_memory: bool = False  # the newest whole snapshot stays in memory, and outlives a staging that fails
    upload: bool = True  # there is a store
    fingerprint: Mapping[str, Any] = field(default_factory=dict)  # JSON values of the run itself, compared at resume
    retry_s: float = 0.5  # first pause before a failed call is asked again; doubles
    retry_max_s: float = 30.0

    def __post_init__(self) -> None:
        if self.on_failure not in ("continue", "abort"):
            raise OptionsError(f"on_failure is {self.on_failure!r}: use 'continue' or 'abort'.", name="on_failure")
        if self.max_consecutive_failures < 1:
            raise OptionsError("max_consecutive_failures is below 1: use 1 or more.", name="max_consecutive_failures")
