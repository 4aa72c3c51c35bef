"""The memory tier: the newest snapshot that lies whole in memory, staged only when it is needed.

Part of the protocol core (as pure as protocol.py). The rules:

- At most one attempt is held. The next attempt whose copy is whole supersedes it, of whatever kind.
- No snapshot for memory is started while a save is under way: that save's own images are as new.
- It is staged when a member is gone (a process crash then costs the step in progress, no more), when a save of the same
  window is asked for, or when somebody asks for what is in memory. It takes the foreground as soon as that is free.
- A staging that fails fails for whoever asked for it, not for the snapshot: that is held again, as it lies whole in
  memory. Where it is needed it is staged again, after pauses that double, RETRIES times; then when somebody asks.
- What is given up while it is held was never on a disk: no record is needed, its images are just freed.
- A new coordinator takes over the newest snapshot that every node still has in memory, staged or not, unless something
  newer is committed. It does so as an attempt of its own: what an earlier one has said of its attempts stays true.
  Until that attempt has the images, those that it found are not cleaned. One that was to be saved goes on to be saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .attempt import Attempt, Pending
from .membership import Membership, Roster, Window
from .messages import Blame, HeldSnapshot, SaveKind, SaveState
from .moves import COPYING, PROVEN, Cause, Phase

if TYPE_CHECKING:
    from .protocol import Protocol


RETRIES = 20
PATIENCE = 5  # failures until a resume waits for it no longer
PATIENCE_S = 120.0  # as well, since the first of them: a disk that hangs fails seldom


def _whole(step: int, told: Mapping[str, HeldSnapshot]) -> tuple[Roster, Window] | None:
    """Who a snapshot is of and where they stood, when its nodes together hold all of it. By node."""
    keepsake = next(iter(told.values())).keepsake
    membership = Membership()
    for role in keepsake.roles:
        membership.declare(role)
    for node, held in told.items():
        membership.register(node, held.members)
    updates = membership.window_problem(step, {node: held.vote for node, held in told.items()}, {})
    if isinstance(updates, Blame):
        return None
    roster = membership.roster()
    return roster, Window(0, step, updates, roster.processes, keepsake.metrics)


class Memory:
    """What one Protocol holds in memory."""

    def __init__(self, core: Protocol) -> None:
        self._core = core
        self.held: Attempt | None = None
        self.wanted = False  # the held one waits for its turn to be staged
        self.not_before_s = 0.0  # it is not staged again earlier
        self.kept: tuple[Attempt, ...] = ()  # found in the memory of nodes, while one of them may be taken over
        self.passing: list[Attempt] = []  # own ones whose images go over to their heirs

    def hold(self, attempt: Attempt) -> None:
        """The attempt's copy is whole, and nobody asks for more: training goes on, the images stay."""
        core = self._core
        attempt.move(Cause.ALL_HELD, core.now_s, "it stays in memory; training may go on")
        core.foreground = None
        self.supersede(attempt)
        self.held, self.not_before_s = attempt, 0.0
        core.announce(attempt, SaveState.SNAPSHOT)
        attempt.requests = [p for p in attempt.requests if p.request.kind is not SaveKind.MEMORY]
        if attempt.requests:  # they waited for the one before
            self.want(attempt.requests[0].request.reason)
        self._look_for_members(attempt)
        self._pause(attempt)

    def _look_for_members(self, attempt: Attempt) -> None:
        if attempt.staging_failures >= RETRIES:
            return
        assert attempt.roster is not None
        for member in self._core.membership.gone_of(attempt.roster.processes)[:1]:
            self.lose_member(f"member {member} was gone before it was saved")

    def keep_or_fail(self, attempt: Attempt, blame: Blame) -> None:
        """Its staging has failed. Where the run keeps snapshots in memory it is held again, else it is given up."""
        core = self._core
        if not core.settings.in_memory:
            core.fail(attempt, blame)
            return
        attempt.move(Cause.KEPT, core.now_s, str(blame))
        attempt.staging_failures += 1
        attempt.failing_since_s = min(attempt.failing_since_s, core.now_s)
        core.foreground = None
        if core.counts(attempt):
            core.count_failure(attempt.id, attempt.head.sequence - 1)
        if attempt.requests or attempt.staging_failures == 1:
            stays = "The snapshot stays in memory, and is saved when a process dies or somebody asks."
            if unheard := self._unheard(attempt):
                stays = f"The snapshot stays in memory, and is whole when {', '.join(unheard)} is heard again with it."
            told = f"{blame.reason.rstrip('. ')}. {stays}"
            core.say_failed(attempt, replace(blame, reason=told))
        attempt.overdue = False  # that was this try's end
        self.held, self.wanted = attempt, False
        self._look_for_members(attempt)
        self._pause(attempt)

    def _pause(self, attempt: Attempt) -> None:
        """One whose staging has failed is not staged again at once."""
        if attempt.staging_failures:
            settings = self._core.settings
            pause_s = settings.retry_s * 2 ** min(attempt.staging_failures - 1, 30)
            self.not_before_s = self._core.now_s + min(pause_s, settings.retry_max_s)

    def keep_images_of(self, attempt: Attempt) -> None:
        """An attempt has failed though all of it was staged: some record could not be written. It is given up for good,
        but its images lie whole in memory: another attempt takes them over, and counts as one whose staging failed."""
        core = self._core
        unheard = any(node not in core.heard for node in attempt.participants)
        if not core.settings.in_memory or unheard or core.foreground is not None or self.held is not None:
            return
        assert attempt.roster is not None and attempt.window is not None
        heir = core.take_over(attempt.origin or attempt.id, attempt.roster, attempt.window, ())
        heir.staging_failures = attempt.staging_failures + 1
        heir.failing_since_s = min(attempt.failing_since_s, core.now_s)
        heir.blame = attempt.blame
        attempt.heir = heir
        self.passing.append(attempt)

    def inherit_nothing(self, committed: Attempt) -> None:
        """Every record of an attempt that was given up says accept after all: what its heir holds is saved."""
        held = self.held
        if held is not None and held.origin == (committed.origin or committed.id) and not held.requests:
            self.drop(f"attempt {committed.id} of the same copy is committed")

    def _let_pass(self) -> None:
        """Whose images have gone over to the heir, or cannot, are cleaned."""
        for attempt in list(self.passing):
            if attempt.heir is None or attempt.heir.phase not in COPYING:
                attempt.heir = None
                attempt.look()
                self.passing.remove(attempt)

    @property
    def unsaved(self) -> str | None:
        """What a resume does without, as a sentence: a snapshot that is not saved. None when there is none."""
        held, front = self.held, self._core.foreground
        if front is not None and front.phase is Phase.STAGING:
            held = front
        if held is None:
            return None
        what = f"Step {held.head.step} lies whole in memory"
        if unheard := self._unheard(held):
            return f"{what}, and the stager of {', '.join(unheard)}, which has a part of it, is not heard."
        if not held.staging_failures:
            return None
        tries = f"{held.staging_failures} tries" if held.staging_failures > 1 else "one try"
        return f"{what}, and {tries} to save it failed: {held.blame}"

    def _unheard(self, attempt: Attempt) -> list[str]:
        return [node for node in attempt.participants if node not in self._core.heard]

    def is_hopeful(self, attempt: Attempt) -> bool:
        """Whether an attempt that lies in memory is going to be saved before long, as far as its failures tell."""
        if not attempt.staging_failures:
            return True
        return attempt.staging_failures < PATIENCE and self._core.now_s < attempt.failing_since_s + PATIENCE_S

    @property
    def saving(self) -> bool:
        """Whether the held snapshot is going to be saved before long."""
        held = self.held
        return self.wanted and held is not None and self.is_hopeful(held) and not self._unheard(held)

    def adopt(self, found: Sequence[Attempt], wall_s: float) -> None:
        """Attempts of earlier coordinators that lie in the memory of nodes: the newest whole snapshot is taken over.

        Unless something newer is committed. What one coordinator has taken over half-way, the next one takes over.
        """
        core = self._core
        self.kept = tuple(sorted(found, key=lambda attempt: attempt.order))
        committed = max((a.order for a in core.attempts.values() if a.phase in PROVEN), default=(0, 0))
        origins: dict[str, dict[str, Attempt]] = {}  # in order of their newest attempt, after the loop
        for attempt in self.kept:
            for node, held in attempt.held_at.items():
                parts = origins.pop(held.origin, {})
                origins[held.origin] = {**parts, node: attempt}
        for origin, parts in reversed(origins.items()):
            newest = max(parts.values(), key=lambda attempt: attempt.order)
            told = {node: attempt.held_at[node] for node, attempt in parts.items()}
            whole = _whole(newest.head.step, told)
            if whole is not None and newest.order > committed:
                core.take_over(origin, *whole, next(iter(told.values())).keepsake.requests, wall_s)
                return

    def _clean_kept(self) -> None:
        """What was found is judged as soon as nothing is taken over from it any more."""
        front = self._core.foreground
        if not self.kept or (front is not None and front.origin is not None and front.phase in COPYING):
            return
        kept, self.kept = self.kept, ()
        for attempt in kept:
            self._core.judge(attempt)

    def supersede(self, newer: Attempt) -> None:
        """A newer copy is whole: it serves whoever waits for the held one, which goes."""
        held = self.held
        if held is None or held is newer:
            return
        for pending in held.requests:
            newer.strengthen(pending)
            self._core.requests.serve(pending, newer)
        held.requests = []
        self.drop(f"the snapshot of step {newer.head.step} is whole")

    def drop(self, why: str) -> None:
        """The held snapshot is of no use any more (or is lost); requests that wait for it are told."""
        held, self.held, self.wanted = self.held, None, False
        if held is None:
            return
        held.superseded = True
        held.move(Cause.SUPERSEDED, self._core.now_s, why)
        if held.requests:
            held.blame = Blame("held", f"the snapshot in memory is gone: {why}")
            self._core.announce(held, SaveState.ABORTED)
            held.requests = []
        else:
            held.announced = SaveState.ABORTED

    def want(self, reason: str) -> None:
        """The held snapshot, if there is one, is to be staged; at once or as soon as no other save is under way."""
        held = self.held
        if held is None:
            return
        if not self.wanted:
            held.tell(self._core.now_s, f"wanted: {reason}")
        self.wanted, self.not_before_s = True, 0.0

    def lose_member(self, reason: str) -> None:
        """A process that the held snapshot is of is gone: what it had is saved."""
        held = self.held
        if held is None:
            return
        held.needed = True
        if not self.wanted:
            held.reason = f"{held.reason}; {reason}" if held.reason else reason
            self.want(reason)

    def ask(self, pending: Pending) -> Blame | None:
        """A request for what lies in memory joins it. Answers why there is nothing to serve it with."""
        core = self._core
        attempt = self.held
        front = core.foreground
        if attempt is None and front is not None and (front.phase not in COPYING or front.origin is not None):
            attempt = front  # whole in memory too, and on its way already
        if attempt is None:
            return Blame("requested", "no snapshot is in memory (option snapshot_freq keeps one)")
        if attempt is self.held and (unheard := self._unheard(attempt)):
            reason = f"the stager of {unheard[0]} is not heard, and it has a part of the snapshot; ask again when it is"
            return Blame("held", reason, unheard[0])
        if not attempt.can_serve(pending.request):
            tag = f"under the tag {attempt.tag!r}" if attempt.tag else "without a tag"
            return Blame("requested", f"what is in memory is being saved {tag} already; ask for it without another one")
        if blame := core.requests.too_late(pending, attempt):
            return blame
        attempt.strengthen(pending)
        core.requests.serve(pending, attempt)
        if attempt is self.held:
            self.want(pending.request.reason)
        core.tell_joined(attempt, pending)
        return None

    def next_deadline_s(self) -> float:
        """When the first request that waits for the held snapshot gives up, or it is to be staged again, or a resume
        waits no longer for it (or for the one that is staged)."""
        held, front = self.held, self._core.foreground
        patience_s = front.failing_since_s + PATIENCE_S if front is not None else math.inf
        if held is None:
            return patience_s
        again_s = self.not_before_s if self.wanted else math.inf
        patience_s = min(patience_s, held.failing_since_s + PATIENCE_S)
        return min([again_s, patience_s, *(pending.deadline_s for pending in held.requests)])

    def settle(self) -> None:
        """Ends requests whose time is up, and stages what is wanted when nothing else is under way."""
        self._clean_kept()
        self._let_pass()
        core, held = self._core, self.held
        if held is None:
            return
        for pending in [p for p in held.requests if p.deadline_s <= core.now_s]:
            held.leave(pending)
            core.requests.end(pending, Blame("held", self._waited(held)))
        if not self.wanted or core.foreground is not None or core.now_s < self.not_before_s or self._unheard(held):
            return
        self.held, self.wanted = None, False
        core.foreground = held
        held.move(Cause.WANTED, core.now_s, held.reason)
        held.phase_deadline_s = core.now_s + core.settings.deadlines.stage_s

    def _waited(self, held: Attempt) -> str:
        """Why a request for the held snapshot has waited in vain."""
        if unheard := self._unheard(held):
            return f"the stager of {', '.join(unheard)}, which has a part of it, was not heard before the deadline"
        return "the save that is under way did not end before the deadline"
