"""The coordinator as a service: what clients may ask, answered by the driver of the protocol. Knows no Ray.

Disposable: everything durable is with the stagers and the store. It is told how to find the run's stagers, claims an
epoch, recovers, and from then on answers. Every answer to a client may be asked for again after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ..storage.errors import (
    DeadlineError,
    LastgoodError,
    MembershipError,
    ResumeError,
    SaveFailedError,
    StoreError,
)
from ..storage.ids import ulid, utc_text
from ..storage.lanes import Lane
from ..storage.layout import RunPaths
from ..storage.store import Store
from .catalog import Checkpoint
from .driver import Driver
from .epochs import claim_epoch
from .housekeeping import STORE_S, Housekeeping
from .member_led import MemberLed
from .messages import (
    AttemptHead,
    Blame,
    Progress,
    RoleDeclaration,
    SaveKind,
    SaveRequest,
    SaveState,
)
from .moves import UNDONE
from .nodes import Nodes
from .options import Options
from .outcomes import DrainOutcome, Missing, SaveOutcome, StepOutcome, WindowOutcome
from .ownership import Identity, Ownership
from .policies import AnyOf, AtSteps, Decision, EverySteps, Moment, Never, SavePolicy
from .ports import Discover, Notices
from .protocol import Deadlines, Settings
from .restore import Restored, ResumeTermsOrder
from .resuming import Resuming
from .runner import answer_within
from .story import Story
from .telling import Telling
from .versions import versions
from .watch import Watch
from .wishes import Wishes

log = logging.getLogger("lastgood.coordinator")
T = TypeVar("T")

OWNER_S = 3600.0  # until it is seen whether another cluster's owner lives; bounded by that owner's own interval
BEATS_PER_OWNER = 5  # heartbeats from one refresh of owner.json to the next


class Service:
    """One incarnation of a run's coordinator. All methods on one event loop; `boot` first."""

    def __init__(
        self,
        options: Options,
        store: Store,
        store_lane: Lane,
        identity: Identity,
        discover: Discover,
        shut_down: Callable[[], Awaitable[None]],
        notices: Notices,
    ) -> None:
        """`store_lane` has threads for the store. `discover` lists the live stagers; `shut_down` ends stagers and this
        process once nothing is left to do; `notices` tells which of the run's nodes are about to go."""
        self.options = options
        self._store = store
        self._store_lane = store_lane
        self._shut_down = shut_down
        self._notices = notices
        self._paths = RunPaths("", options.run)
        self._ownership = Ownership(store, self._paths, identity, options.heartbeat_s * BEATS_PER_OWNER)
        self._identity = identity
        self._knows_line = False  # a resume, or the driver's word, told where this line began
        self._tasks: set[asyncio.Task[None]] = set()
        self._restoring = asyncio.Lock()
        self.epoch = 0
        self.waits_for: str | None = None  # why boot takes long, a sentence
        self.driver: Driver | None = None
        self._housekeeping: Housekeeping | None = None  # these once it has booted
        self._resuming: Resuming | None = None
        self._wishes: Wishes | None = None
        self.telling = Telling(lambda: self._led, self.newest)
        self.member_led = MemberLed(self)
        self.nodes = Nodes(discover, lambda: self._led, self.member_led.hear, options.heartbeat_s)

    async def boot(self) -> None:
        """Finds the stagers, claims an epoch, recovers what earlier incarnations left. Raises what prevents it."""
        check = functools.partial(self._ownership.check, self.options.takeover, self._wait_for)
        await self._store_lane.run("who leads the run", check, OWNER_S)
        self.waits_for = None
        ports = await self.nodes.discover()
        heights = await asyncio.gather(*(port.highest_epoch() for port in ports), return_exceptions=True)
        floor = max([0, *(height for height in heights if isinstance(height, int))])
        claim = functools.partial(claim_epoch, self._store, self._paths, self._identity.token, floor)
        self.epoch = await self._at_store("claiming an epoch", claim)
        await self._at_store("the first heartbeat", functools.partial(self._ownership.beat, self.epoch))
        options = self.options
        self.driver = Driver(
            Settings(
                run=options.run,
                epoch=self.epoch,
                deadlines=Deadlines(
                    save_s=options.save_deadline_s,
                    snapshot_s=options.snapshot_deadline_s,
                    mark_s=options.snapshot_deadline_s,
                    stage_s=options.stage_deadline_s,
                    accept_s=options.accept_deadline_s,
                    upload_s=options.upload_deadline_s,
                ),
                fingerprint=options.fingerprint,
                on_failure=options.on_failure,
                max_consecutive_failures=options.max_consecutive_failures,
                overlapped=options.snapshot == "overlapped",
                in_memory=options.snapshot_freq is not None,
            ),
            store=self._store,
            new_attempt_id=ulid,
            clock=time.monotonic,
            now_utc=lambda: utc_text(time.time()),
            versions=versions(),
            home=self._paths.epoch(self.epoch),
        )
        self._housekeeping = Housekeeping(
            options, self._store, self._store_lane, self._ownership, self.driver, self.nodes.ports
        )
        self._resuming = Resuming(options, self.driver, self.nodes)
        self._wishes = Wishes(self.nodes.ports, self.epoch, self.background)
        self.driver.on_announce += [self._housekeeping.hear, self.telling.hear, self._wishes.hear]
        await self.nodes.meet(ports)
        for sentence in await self.driver.recover():
            log.warning("epoch %d: %s", self.epoch, sentence)
        await self._reopen()
        for request in {known.request_id: known for told in self.nodes.wishes.values() for known in told}.values():
            await self.save(request)
        watch = Watch(self, self.driver, self._notices)
        self.background(watch.over_life())
        self.background(self._housekeeping.run())
        if options.save_on_preemption:
            self.background(watch.over_notices())
        for work in self.member_led.works():
            self.background(work)

    def _wait_for(self, why: str) -> None:
        self.waits_for = why

    async def _at_store(self, doing: str, work: Callable[[], T]) -> T:
        """A call to the store. Raises StoreUnavailableError when it has not answered within STORE_S."""
        return await self._store_lane.run(doing, work, STORE_S)

    @property
    def _led(self) -> Driver:
        if self.driver is None:
            raise LastgoodError(f"the coordinator of {self.options.run} has not started yet; ask again")
        return self.driver

    @property
    def _keeping(self) -> Housekeeping:
        assert self._housekeeping is not None, "boot makes it"
        return self._housekeeping

    @property
    def declared(self) -> Mapping[str, RoleDeclaration]:
        """The roles of the run."""
        return self._led.core.membership.declarations

    # -- nodes and members

    async def declare(self, declaration: RoleDeclaration) -> Missing:
        """A role of the run. Answers what is still missing of it (agents that have not registered yet).

        Raises UsageError when its members lead the run.
        """
        self.member_led.refuse_another_driver(declaration)
        self._led.declare(declaration)
        self.nodes.forget_replaced(declaration)
        await self.nodes.refresh()
        return self.nodes.missing()

    async def _reopen(self) -> None:
        """Takes over the window that was open when the coordinator before this one died, if it still is."""
        step = next(iter(self.nodes.marked_steps), None)
        if not self.declared or self.nodes.missing().members or len(self.nodes.marked_steps) != 1 or step is None:
            return
        outcome = await self._led.reopen_window(step)
        if not outcome.opened:
            log.info("the window of step %d is closed: saves wait for the next end_step (%s)", step, outcome.blame)

    # -- the run

    async def end_step(self, step: int, metrics: Mapping[str, float], progress: Progress, again: bool) -> StepOutcome:
        """Step `step` has ended everywhere: opens its window and, when due, copies it. Returns once training may go on.

        `again`: the client repeats itself after a restart; a step that was committed meanwhile is not saved twice.
        """
        began = time.monotonic()
        still = functools.partial(self.require_members, f"end_step({step})", progress.memberships)
        still()
        await self._redeclare(progress)
        self.heed(progress)
        incarnations = dict(self.nodes.incarnations)
        if self.nodes.missing().members:
            await self.nodes.await_return(began + self.options.return_deadline_s)
        saved = self.saved_before(step, progress) if again else None
        open_window = functools.partial(self._led.open_window, still=still)
        return await self._end_step(step, metrics, saved, open_window, began, incarnations)

    def require_members(self, what: str, memberships: Mapping[str, str]) -> None:
        """A driver speaks for the members that it has declared. Its call may outlive it, and wait for members to come
        back: those of the driver after it never made that step. Raises MembershipError."""
        for role, membership in memberships.items():
            declared = self.declared.get(role)
            if declared is not None and declared.membership != membership:
                raise MembershipError(
                    f"{what} of run {self.options.run} is not of the members that count now: those of role {role} were "
                    "replaced by a later add_members call, perhaps of another driver. Nothing was saved or restored by "
                    "this call. End this driver if another one leads the run now.",
                    role=role,
                )

    async def cut(self, step: int, metrics: Mapping[str, float], after: tuple[int, int]) -> StepOutcome:
        """As end_step, of a step that every member has marked by itself and at whose end all of them wait.

        `after`: all checkpoints of this line of the run are above this (epoch, sequence).
        """
        saved = self.saved_before(step, Progress(newest=after))
        began, incarnations = time.monotonic(), dict(self.nodes.incarnations)
        return await self._end_step(step, metrics, saved, self._led.reopen_window, began, incarnations)

    async def _end_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        saved: str | None,
        open_window: Callable[..., Awaitable[WindowOutcome]],
        began: float,
        incarnations: Mapping[str, str],
    ) -> StepOutcome:
        decision = self._due(step, metrics)
        memory = self._memory_due(step)
        if saved is not None:
            decision = Decision(False, f"step {step} was saved before the coordinator was restarted")
        opening = functools.partial(open_window, step, metrics, decision, memory)
        outcome = await self._open(opening, began, incarnations)
        told = self.telling.outcome(outcome, decision, time.monotonic() - began)
        return told if saved is None else replace(told, saving=saved, saved=saved)

    async def _open(
        self, opening: Callable[[], Awaitable[WindowOutcome]], began: float, incarnations: Mapping[str, str]
    ) -> WindowOutcome:
        """Opens a window; once more when a stager was restarted and its members have come back since."""
        outcome = await opening()
        if not outcome.opened:
            await self.nodes.await_return(began + self.options.return_deadline_s)
            if self.nodes.incarnations != incarnations and not self.nodes.missing().members:
                return await opening()
        return outcome

    async def reopen(self, step: int) -> None:
        """Opens the window of the last step, which every member has marked by itself. Raises SaveFailedError."""
        opening = functools.partial(self._led.reopen_window, step)
        outcome = await self._open(opening, time.monotonic(), dict(self.nodes.incarnations))
        if not outcome.opened:
            raise SaveFailedError(
                f"the last step {step} of run {self.options.run} is not committed: {outcome.blame}. The previous "
                "checkpoint stands; nothing was ended. Call close() again, or close(save_last=False) to end without "
                "it.",
                step=step,
            )

    async def miss(self, step: int, blame: Blame, *, again: bool) -> StepOutcome:
        """The end of `step` is not there to be saved; whatever was to be saved at it has failed. `again`: for the same
        reason as the one before, so it counts as one failure."""
        decision = self._due(step, {})
        return self.telling.outcome(await self._led.miss_window(step, decision, blame, again=again), decision)

    def is_due(self, step: int) -> bool:
        """Whether a save, or a snapshot for memory, is due at the end of a step."""
        return self._due(step, {}).due or self._memory_due(step).due

    def heed(self, progress: Progress) -> None:
        """Takes over what a restarted coordinator has forgotten: where this line of the run began."""
        if progress.resumed is None:
            return
        self._keeping.protect(progress.resumed)
        if not self._knows_line:
            self._knows_line = True
            if self.newest() <= progress.resumed_after:  # nothing was committed since: the next grows from there
                self._led.resumed_from(progress.resumed)

    async def _redeclare(self, progress: Progress) -> None:
        """Roles that coordinator and stagers have forgotten, since all of them were killed, are the driver's word."""
        if set(self.declared.values()) < set(progress.roles):
            for declaration in progress.roles:
                self._led.declare(declaration)
                self.nodes.awaited.add(declaration.membership)
            await self.nodes.refresh()

    def newest(self) -> tuple[int, int]:
        """(epoch, sequence) of the newest checkpoint that is known, of whatever line; (0, 0) when there is none."""
        return max(((found.epoch, found.sequence) for found in self.checkpoints()), default=(0, 0))

    def saved_before(self, step: int, progress: Progress) -> str | None:
        """The attempt by which an earlier incarnation has committed this very end_step: newer than the step before."""
        return next(
            (
                found.attempt
                for found in self.checkpoints()
                if found.committed and found.step == step and (found.epoch, found.sequence) > progress.newest
            ),
            None,
        )

    def _due(self, step: int, metrics: Mapping[str, float]) -> Decision:
        policy: SavePolicy = Never() if self.options.save_freq is None else EverySteps(self.options.save_freq)
        if self.options.save_first and not self.checkpoints() and not self._saves_now():
            policy = AnyOf((policy, AtSteps(frozenset({step}))))
        return policy.decide(Moment(step, time.monotonic(), self.telling.saved_step, None, metrics))

    def _saves_now(self) -> bool:
        """Whether an attempt of this incarnation is on its way to its commit."""
        return any(
            attempt.mine and attempt.kind is not SaveKind.MEMORY and attempt.phase not in UNDONE
            for attempt in self._led.core.active.values()
        )

    def _memory_due(self, step: int) -> Decision:
        policy: SavePolicy = Never() if self.options.snapshot_freq is None else EverySteps(self.options.snapshot_freq)
        return policy.decide(Moment(step))

    async def before_update(self) -> None:
        """The next update begins: no copy runs when it returns."""
        await self._led.close_window()

    async def save(self, request: SaveRequest) -> SaveOutcome:
        """Takes a request in; see Driver.save."""
        log.info("save requested by %s: %s (%s)", request.requested_by, request.reason, request.request_id)
        assert self._wishes is not None, "boot makes it"
        self._wishes.note(request)
        outcome = await self._led.save(request)
        self.member_led.wake()
        await self._wishes.keep(request)
        return outcome

    async def wait(self, request_id: str, state: SaveState, timeout_s: float) -> SaveOutcome:
        """How far a request has come, once it has reached `state`, has failed, or `timeout_s` has passed."""
        return await self._led.wait(request_id, state, timeout_s)

    async def finish(self, timeout_s: float, request_id: str, progress: Progress) -> DrainOutcome:
        """The run ends: saves the last step unless it is committed, then waits until everything committed is durable.

        Raises SaveFailedError when the last step could not be committed.
        """
        until = time.monotonic() + timeout_s
        self.require_members("close", progress.memberships)
        await self._redeclare(progress)
        self.heed(progress)
        await self._led.settle(timeout_s)
        committed = any(found.attempt == progress.saved and found.committed for found in self.checkpoints())
        if progress.last_step is not None and not committed:
            request = SaveRequest(request_id, SaveKind.FINAL, "the run was closed", requested_by="close()")
            outcome = await self._led.save(request)
            if outcome.waits_for is None:  # else it waits for an end_step that will not come
                outcome = await self._led.wait(request_id, SaveState.COMMITTED, max(0.0, until - time.monotonic()))
            if not outcome.committed:
                mend = f"Call end_step({progress.last_step}) once more and then close()"
                if self.member_led.leads:
                    mend = "Call close() again"
                standing = "may still turn out committed" if outcome.in_doubt else "is not committed"
                raise SaveFailedError(
                    f"the last step {progress.last_step} of run {self.options.run} {standing}: "
                    f"{outcome.blame or outcome.waits_for or outcome.state.value}. The previous checkpoint stands; "
                    f"nothing was ended. {mend}, or close(save_last=False) to end without it.",
                    step=progress.last_step,
                )
        self._led.drop_memory("the run was closed")
        return await self._led.drain(max(0.0, until - time.monotonic()))

    async def end(self) -> None:
        """Ends the service: stagers release images and directories, then every process of lastgood for the run ends."""
        self.nodes.ending = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self.driver is not None:
            await self.driver.stop()
        results = await asyncio.gather(
            *(port.close_down() for port in self.nodes.ports.values()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                log.warning("a stager did not close down: %s", result)
        await self._store_lane.rest(STORE_S)  # what it writes there is whole before it goes
        with contextlib.suppress(StoreError):
            if self._housekeeping is not None:
                await self._housekeeping.sweep(0.0, STORE_S)  # nobody writes here any more
        with contextlib.suppress(StoreError):  # the next attach then waits until this owner counts as silent
            await self._at_store("leaving it", self._ownership.leave)
        await self._shut_down()

    # -- resume

    async def resume(self, mode: int | str, terms: ResumeTermsOrder) -> Restored | None:
        """Restores the run (see restore.py); None from scratch. The window of the restored step is open then.

        One at a time: that of a driver that has died must not write into live state after that of the next one.
        """
        until = time.monotonic() + terms.deadline_s
        await answer_within(self._restoring.acquire(), terms.deadline_s, "another resume of this run", "its end")
        try:
            self.require_members("resume", terms.memberships)
            return await self._restore(mode, terms, until)
        finally:
            self._restoring.release()

    async def _restore(self, mode: int | str, terms: ResumeTermsOrder, until: float) -> Restored | None:

        def remaining_s() -> float:
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"resume of run {self.options.run} took longer than {terms.deadline_s:.0f} s (resume_deadline_s). "
                    "Nothing was deleted; look at the log for the phase, or allow more time.",
                    waited_s=terms.deadline_s,
                )
            return left

        await self.nodes.refresh()
        if not self.declared:
            raise MembershipError(
                f"resume of run {self.options.run} before it has members. Nothing was touched. Call add_members for "
                "every role, and add_driver, first.",
            )
        missing = self.nodes.missing().members
        if missing:
            mend = "Call add_members again for the roles whose actors were replaced."
            if self.member_led.leads:
                mend = "Start the whole group again: every rank calls lastgood.member and resume."
            raise MembershipError(
                f"resume needs every member, and {', '.join(missing)} of run {self.options.run} are not there. "
                f"Nothing was touched. {mend}",
                missing=missing,
            )
        if not await self._led.settle(remaining_s()):
            remaining_s()  # raises: the time is up
        restored = None
        assert self._resuming is not None
        with self._keeping.at_rest():  # nothing that it reads is collected meanwhile
            if mode != "none":
                restored = await self._resuming.restore(mode, terms, remaining_s)
            head = None
            if restored is not None:
                head = AttemptHead(restored.attempt, restored.step, restored.epoch, restored.sequence)
            self._keeping.protect(head)
        self._led.resumed_from(head)
        self._knows_line = True
        step = 0 if restored is None else restored.step
        self.telling.saved_step = None if restored is None else restored.step
        still = functools.partial(self.require_members, "resume", terms.memberships)
        outcome = await self._led.open_window(step, {}, Decision(False, "the run has just been resumed"), still=still)
        if not outcome.opened:
            raise ResumeError(f"step {step} was restored, but its window did not open: {outcome.blame}", step=step)
        return restored

    # -- reports

    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint known, newest first."""
        return self._led.checkpoints()

    def status(self) -> dict[str, Any]:
        """JSON-able report for people and monitoring."""
        return {
            **self._led.status(),
            "member_led": self.member_led.status(),
            "run": self.options.run,
            "store": self.options.store,
            "saved_step": self.telling.saved_step,
            "newest": self._newest_told(),
            "roles": {role: declared.world_size for role, declared in sorted(self.declared.items())},
            "missing": list(self.nodes.missing().members),
            "nodes_silent": sorted(self.nodes.silent),
        }

    def _newest_told(self) -> dict[str, Any] | None:
        newest = next((found for found in self.checkpoints() if found.committed), None)
        return newest and {"step": newest.step, "attempt": newest.attempt, "state": newest.state.value}

    def stories(self, step: int) -> tuple[Story, ...]:
        """Every attempt of a step, with its times in UTC, oldest first."""
        offset_s = time.time() - time.monotonic()
        return self._led.stories(step, lambda when_s: utc_text(when_s + offset_s))

    async def changed(self, seen: Mapping[str, bool], timeout_s: float) -> list[Checkpoint]:
        """See Driver.changed."""
        return await self._led.changed(seen, timeout_s)

    # -- background

    def background(self, work: Awaitable[None]) -> asyncio.Future[None]:
        """Runs something beside the answers; it must not raise."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
