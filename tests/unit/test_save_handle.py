"""Waiting for a save: it ends in time whatever the coordinator does, and a deadline goes on over its restart."""

from __future__ import annotations

from typing import Any, cast

import pytest

from lastgood.client import run as client
from lastgood.client.link import CoordinatorLink
from lastgood.client.run import SaveHandle
from lastgood.coordinator.messages import SaveKind, SaveRequest, SaveState
from lastgood.coordinator.outcomes import SaveOutcome
from lastgood.storage.errors import DeadlineError, UsageError


class Clock:
    """Stands in for the module time."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s + 1e9


class Link:
    """A coordinator that does not answer; `restarted`: one that has forgotten the request, and takes it again."""

    run = "run"

    def __init__(self, *, restarted: bool = False) -> None:
        self.limits_s: list[float] = []
        self.requests: list[SaveRequest] = []
        self.restarted = restarted

    def call(self, method: str, *arguments: Any, timeout_s: float, again: bool = False) -> SaveOutcome:
        self.limits_s.append(timeout_s)
        if method == "wait" and self.restarted:
            raise UsageError("no such request")
        if method == "save":
            self.requests.append(arguments[0])
            return SaveOutcome("r", SaveState.COMMITTED)
        raise DeadlineError("the coordinator has not answered", waited_s=timeout_s)


def handle(link: Link, deadline_s: float | None) -> SaveHandle:
    request = SaveRequest("r", SaveKind.MANUAL, "a test", deadline_s=deadline_s)
    return SaveHandle(cast("CoordinatorLink", link), request, SaveOutcome("r", SaveState.REQUESTED))


def test_a_coordinator_that_does_not_answer_does_not_hold_the_wait_beyond_its_time() -> None:
    link = Link()
    with pytest.raises(DeadlineError):
        handle(link, None).wait("committed", 5.0)
    assert max(link.limits_s) <= 5.0 + client.GRACE_S


def test_a_restarted_coordinator_is_given_what_is_left_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, link = Clock(), Link(restarted=True)
    monkeypatch.setattr(client, "time", clock)
    save = handle(link, 30.0)
    clock.now_s += 25.0
    assert save.wait("committed", 60.0).committed
    assert [(request.deadline_s, request.asked_at) for request in link.requests] == [(5.0, clock.time())]
