"""A run that its members lead: every rank runs the loop and calls end_step itself. Knows no Ray.

Four things are done together by all ranks: joining, resume, cuts (grants.py says when), close. Each is asked for by
every rank, done once, and answered to all alike; a call may be repeated after a restart of the coordinator. What a
restarted one must know (the line, the highest grant) lies with the stagers and the agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..storage.errors import (
    DeadlineError,
    FencedError,
    LastgoodError,
    MembershipError,
    ResumeError,
    SaveFailedError,
    UsageError,
)
from ..storage.ids import ulid
from .gathering import POLL_S, Gathering
from .grants import CutAt, GiveUp, Grants, GrantTo
from .messages import Blame, Grant, Inventory, Line, MemberId, Progress, RankReport, RoleDeclaration
from .names import is_led
from .outcomes import DrainOutcome, StepOutcome
from .restore import ResumeTermsOrder
from .telling import fenced

if TYPE_CHECKING:
    from .driver import Driver
    from .service import Service

log = logging.getLogger("lastgood.coordinator")

TICK_S = 0.5  # between two looks at deadlines
GRANT_S = 30.0  # until a grant that a stager did not take counts as lost; the next beat brings it again
LEAVE_S = 10.0  # how long the end of the run waits for the last members to leave
TELL_S = 90.0  # beyond its deadline, for what all ranks wait for to tell why it is late


@dataclass
class _Together:
    """Something that every declared member asks for: done once, when all have, and answered to all of them."""

    began_s: float
    answer: asyncio.Future[Any]
    asked: dict[MemberId, Any] = field(default_factory=dict)  # member -> with which arguments
    memberships: set[str] = field(default_factory=set)  # of those who asked
    work: asyncio.Future[None] | None = None


class MemberLed:
    """The ranks' side of one incarnation of the coordinator. All methods on the service's event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.gathering = Gathering(service, lambda: self._roles)
        self._line: Line | None = None
        self._grants: Grants | None = None
        self._heard: Grant | None = None  # the highest that stagers and agents know of
        self._grant: Grant | None = None  # the last that was given out
        self._void = (0, 0)  # key of the newest line that did not reach all nodes: its resume has failed
        self._metrics: dict[MemberId, RankReport] = {}
        self._outcome: StepOutcome | None = None
        self._outcomes = 0
        self._stop_at: int | None = None  # the step at whose end all ranks are told that training must stop
        self._lines = 0
        self._window_open = False  # of the step that the line began after
        self._resuming: _Together | None = None
        self._closing: _Together | None = None
        self._finishing = False
        self._wake = asyncio.Event()
        self._booted_s = time.monotonic()
        self._missing_since: dict[str, float] = {}  # members that closing waits for -> since when they are not there

    def works(self) -> tuple[Awaitable[None], ...]:
        """What runs in the background, from the end of boot on."""
        self._driver.on_announce.append(lambda _: self._wake.set())
        return (self._lead(), self._beat())

    def wake(self) -> None:
        """Something has changed that may call for a cut."""
        self._wake.set()

    @property
    def _driver(self) -> Driver:
        assert self._service.driver is not None, "boot makes it"
        return self._service.driver

    @property
    def _roles(self) -> dict[str, RoleDeclaration]:
        """The declared roles whose members lead."""
        return {role: told for role, told in self._service.declared.items() if is_led(told.driver)}

    @property
    def leads(self) -> bool:
        """Whether the run has members that lead."""
        return bool(self._roles)

    @property
    def _crew(self) -> tuple[str, ...]:
        return tuple(sorted(declaration.membership for declaration in self._roles.values()))

    def _expected(self) -> list[MemberId]:
        return [MemberId(role, rank) for role, told in sorted(self._roles.items()) for rank in range(told.world_size)]

    def _node_of(self, member: MemberId) -> str | None:
        nodes = (node for node, infos in self._service.nodes.members.items() if any(i.member == member for i in infos))
        return next(nodes, None)

    def status(self) -> dict[str, Any] | None:
        """JSON-able; None when no line was begun."""
        if self._line is None or self._grants is None:
            return None
        ended = {str(member): self._grants.ended(member) for member in sorted(self._grants.members)}
        absent = [str(member) for member in sorted(self._grants.absent)]
        return {"granted": self._grants.granted, "ended": ended, "absent": absent, "began_after": self._line.step}

    # -- joining

    def live(self) -> list[str]:
        """Ids of live processes that host members of a role that leads itself."""
        roles = self._roles
        infos = [info for infos in self._service.nodes.members.values() for info in infos]
        return sorted({info.process for info in infos if info.member.role in roles})

    def refuse_another_driver(self, declaration: RoleDeclaration) -> None:
        """Raises UsageError when a driver declares a role of a run that its live members lead."""
        if not is_led(declaration.driver) and self.live():
            raise UsageError(
                f"run {self._service.options.run} is led by its members ({len(self.live())} live processes called "
                "lastgood.member). Nothing was touched. Use either a driver (attach) or member-led ranks for one run; "
                "lastgood.connect looks and saves.",
                run=self._service.options.run,
            )

    # -- what all ranks ask for together

    async def _together(
        self, slot: _Together | None, member: MemberId, membership: str, arguments: Any, deadline_s: float, what: str
    ) -> Any:
        """Waits until whoever does it has answered. Raises its error, or DeadlineError naming who did not ask."""
        assert slot is not None
        slot.asked[member] = arguments
        slot.memberships.add(membership)
        self._wake.set()
        left_s = slot.began_s + deadline_s - time.monotonic()
        try:
            return await asyncio.wait_for(asyncio.shield(slot.answer), max(0.0, left_s))
        except asyncio.TimeoutError:
            late = [str(each) for each in self._expected() if each not in slot.asked]
            if not late:  # it is under way with the same deadline, and knows what it waits for
                with contextlib.suppress(asyncio.TimeoutError):
                    return await asyncio.wait_for(asyncio.shield(slot.answer), TELL_S)
            who = f"{', '.join(late)} did not call {what}" if late else f"{what} is not over"
            error = DeadlineError(
                f"{what} of run {self._service.options.run}: after {deadline_s:.0f} s {who}. What is committed stands. "
                f"Every rank must call {what}.",
                waited_s=deadline_s,
                late=late,
            )
            if not slot.answer.done():
                slot.answer.set_exception(error)
            raise error from None

    def _new_together(self) -> _Together:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.exception())  # all who asked may have died
        return _Together(time.monotonic(), answer)

    def _current(self, slot: _Together | None) -> _Together | None:
        """The same, unless one who asked was replaced since: then it is over, and what others ask begins anew."""
        if slot is None or slot.memberships <= set(self._crew):
            return slot
        if slot.work is not None:
            slot.work.cancel()
        if not slot.answer.done():
            slot.answer.set_exception(MembershipError("other processes have joined since. End this process."))
        return None

    # -- resume

    async def resume(
        self,
        member: MemberId,
        membership: str,
        after: tuple[int, int] | None,
        mode: int | str,
        terms: ResumeTermsOrder,
    ) -> Line:
        """One rank asks for a resume; answers the line that all continue on, once every declared member has asked.

        `after`: key of the line that it is on; a resume that it was not told of and that was asked for with the same
        arguments (this call is a repetition) is told again. Raises as Service.resume, UsageError when the ranks ask
        for different things.
        """
        self._check_member(member, membership)
        arguments = (mode, terms)
        while self._line is None and not self._adopt() and self._adoptable() is not None:
            await asyncio.sleep(POLL_S)  # some may have been told a line that began just before a restart
        self._check_member(member, membership)
        line = self._line
        untold = line is not None and line.crew == self._crew and (after is None or line.key > after)
        if line is not None and untold and line.asked == arguments:
            return line
        self._drop_replaced()
        if self._resuming is None or self._resuming.answer.done():
            self._resuming = self._new_together()
            self._resuming.work = self._service.background(self._resume(self._resuming))
        return await self._together(self._resuming, member, membership, arguments, terms.deadline_s, "resume()")

    def _drop_replaced(self) -> None:
        """What processes that were replaced had asked for is given up."""
        self._resuming, self._closing = self._current(self._resuming), self._current(self._closing)

    async def _resume(self, slot: _Together) -> None:
        try:
            while set(slot.asked) != set(self._expected()):
                if slot.answer.done():
                    return
                await asyncio.sleep(POLL_S)
            mode, terms = next(iter(slot.asked.values()))
            for member, asked in slot.asked.items():
                if asked != (mode, terms):
                    first = next(iter(slot.asked))
                    raise UsageError(
                        f"resume: {first} asks for {mode!r} and {member} for {asked[0]!r}"
                        f"{'' if asked[0] != mode else ' on other terms'}. Nothing was touched. Every rank must call "
                        "resume with the same arguments.",
                    )
            line = await self._begin_line(mode, terms, self._left_s(slot, terms.deadline_s))
            if not slot.answer.done():
                slot.answer.set_result(line)
        except Exception as error:  # noqa: BLE001 - it belongs to those who asked
            if not slot.answer.done():
                slot.answer.set_exception(error)

    def _left_s(self, slot: _Together, deadline_s: float) -> float:
        return max(0.1, slot.began_s + deadline_s - time.monotonic())

    async def _begin_line(self, mode: int | str, terms: ResumeTermsOrder, left_s: float) -> Line:
        service = self._service
        self._line = self._grants = self._grant = None  # whatever was granted is void
        restored = await service.resume(mode, replace(terms, deadline_s=left_s))
        step = 0 if restored is None else restored.step
        self._lines += 1
        line = Line(service.epoch, self._lines, self._crew, step, service.newest(), restored, (mode, terms))
        grants = Grants(self._expected(), step, service.options.snapshot_deadline_s)
        self._grant = Grant(line, step, step)
        failed = await self._pass_on(self._grant)
        if failed:
            self._void = line.key  # the nodes that took it tell of it
            raise ResumeError(
                f"step {step} was restored, but {'; '.join(failed)}. Call resume again.",
                step=step,
            )
        self._line, self._grants, self._window_open = line, grants, True
        for member in grants.members:
            grants.report(member, step, None, time.monotonic())
        self._outcome, self._stop_at, self._metrics = None, None, {}
        self._wake.set()
        return line

    # -- leading

    def hear(self, inventory: Inventory) -> None:
        """What a stager and its agents know of grants."""
        for grant in (inventory.granted, *(info.granted for info in inventory.members)):
            if grant is not None and (self._heard is None or grant.order > self._heard.order):
                self._heard = grant
                self._wake.set()

    def _adoptable(self) -> Grant | None:
        """The highest grant of the line that is to be taken over once its members are here, if there is one."""
        heard = self._heard
        if heard is None or heard.line.crew != self._crew or heard.line.key <= self._void or self._resuming_now:
            return None
        return heard

    def _adopt(self) -> bool:
        """Takes over the line that the coordinator before this one led, once all its members are here.

        Those that are not here after return_deadline_s are not waited for: what they were granted may be unknown then,
        and a cut that meets it fails by the members' own word.
        """
        heard, service = self._adoptable(), self._service
        if self._line is not None or heard is None:
            return False
        waited_s = time.monotonic() - self._booted_s
        if service.nodes.missing().members and waited_s < service.options.return_deadline_s:
            return False
        self._line = heard.line
        self._grants = Grants(self._expected(), heard.step, service.options.snapshot_deadline_s)
        restored = heard.line.restored
        newest = heard.line.newest
        head = None if restored is None else restored.head
        service.heed(Progress(resumed=head, resumed_after=newest, newest=newest))
        self._grant = Grant(heard.line, heard.step, 0)  # all report at their next end_step
        self._window_open = True
        log.info("the members lead from grant %d on (line %s)", heard.step, heard.line.key)
        self._wake.set()
        return True

    @property
    def _resuming_now(self) -> bool:
        return self._resuming is not None and not self._resuming.answer.done()

    def report(self, reports: Sequence[RankReport]) -> None:
        """Ranks tell which step they have ended."""
        for report in reports:
            if self._line is None or self._grants is None or report.line != self._line.key:
                continue
            self._grants.report(report.member, report.step, report.step_s, time.monotonic())
            self._metrics[report.member] = report
        self._wake.set()

    async def _lead(self) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)
            self._wake.clear()
            try:
                await self._go_on()
            except FencedError as error:
                log.error("%s", error)
                self._tell(fenced(error))  # the beat brings it, unless the ranks follow the newer one
                return
            except Exception:
                log.exception("one decision for the members of %s failed", self._service.options.run)
                await asyncio.sleep(TICK_S)

    async def _go_on(self) -> None:
        self._drop_replaced()
        if self._driver.core.fenced is not None:
            self._driver.fence(self._driver.core.fenced)  # raises
        if self._line is not None and self._line.crew != self._crew:
            self._line = self._grants = self._grant = None  # other ranks have joined: they resume first
        if self._adopt() and self._grant is not None:
            await self._pass_on(self._grant)
        grants, line = self._grants, self._line
        if grants is None or line is None:
            return
        if self._window_open and (grants.front or 0) > line.step:
            self._window_open = False
            await self._driver.forget_window()
        while grants is self._grants and not self._finishing:
            decision = grants.decide(time.monotonic(), self._service.is_due, self._is_asked())
            if decision is None:
                return
            await self._carry_out(grants, line, decision)

    def _is_asked(self) -> bool:
        """Whether a request waits for a cut, and could be served by it."""
        core = self._driver.core
        return bool(core.requests.waiting) and core.foreground is None

    async def _carry_out(self, grants: Grants, line: Line, decision: GrantTo | CutAt | GiveUp) -> None:
        if isinstance(decision, CutAt):
            metrics = self._metrics_of(decision.step)
            outcome = await self._service.cut(decision.step, metrics, line.after)
            if self._service.options.snapshot == "overlapped":  # its copy goes on beside training
                self._service.background(self._forget_window())
            else:
                await self._driver.forget_window()
            self._tell(outcome)
            grants.cut_done(decision.step)
        elif isinstance(decision, GiveUp):
            await self._miss(decision)
        else:
            news = (self._outcome, self._outcomes, self._stop_at)
            self._grant = Grant(line, decision.step, decision.tell_at, *news)
            await self._pass_on(self._with_news(self._grant))

    async def _forget_window(self) -> None:
        with contextlib.suppress(FencedError):  # the next decision tells
            await self._driver.forget_window()

    async def _miss(self, given_up: GiveUp) -> None:
        """A cut is not made, since members did not come to it: tells who, where, and what they reported last."""
        late, waited_s = given_up.late, given_up.waited_s
        named = [
            f"{member} (node {self._node_of(member) or 'unknown: its process is gone'}, last step reported: "
            f"{'none' if ended is None else ended})"
            for member, ended in sorted(late.items())
        ]
        how = "still missing"
        if waited_s is not None:
            how = f"did not arrive within {waited_s:.1f} s of the first (snapshot_deadline_s)"
        first = min(late)
        why = f"{', '.join(named)} {how}; the others train on"
        blame = Blame("window", why, self._node_of(first), first, waited_s)
        self._tell(await self._service.miss(given_up.step, blame, again=waited_s is None))

    def _metrics_of(self, step: int) -> Mapping[str, float]:
        """Those of the lowest rank of each role, of this step."""
        found: dict[str, float] = {}
        for role in sorted(self._roles):
            report = self._metrics.get(MemberId(role, 0))
            if report is not None and report.step == step:
                found.update(report.metrics)
        return found

    def _tell(self, outcome: StepOutcome) -> None:
        """The next grant carries it. Once training must stop, every later outcome says so.

        The ranks are at different steps when they hear it. All raise at the end of the first step that none of them
        can have passed: one that raised earlier would leave the others hanging in a collective of the next step.
        """
        if self._outcome is not None and self._outcome.stop:
            outcome = replace(outcome, stop=True, failures=outcome.failures or self._outcome.failures)
        if outcome.stop and self._stop_at is None and self._grants is not None:
            self._stop_at = self._grants.granted + 1
        self._outcome = outcome
        self._outcomes += 1

    def _with_news(self, grant: Grant) -> Grant:
        news = self._service.telling.news(grant.step)
        if news is not None:
            self._tell(news)
        if (grant.outcome, grant.outcome_number) != (self._outcome, self._outcomes):
            grant = replace(grant, outcome=self._outcome, outcome_number=self._outcomes, stop_at=self._stop_at)
            self._grant = grant
        return grant

    async def _pass_on(self, grant: Grant) -> list[str]:
        """Gives a grant to every node with members. Answers what failed; the next beat brings it again."""
        ports, epoch = self._service.nodes.ports, self._service.epoch
        nodes = [node for node, infos in self._service.nodes.members.items() if infos]
        calls = (asyncio.wait_for(ports[node].grant(epoch, grant), GRANT_S) for node in nodes)
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed = []
        for node, result in zip(nodes, results, strict=True):
            if isinstance(result, FencedError):
                self._driver.fence(str(result))
            if isinstance(result, BaseException):
                failed.append(f"node {node} did not take grant {grant.step}: {type(result).__name__} {result}")
                log.warning("%s", failed[-1])
        return failed

    async def _beat(self) -> None:
        """The last grant again and again: whoever missed it gets it, and the ranks know that somebody leads."""
        options = self._service.options
        while True:
            await asyncio.sleep(min(options.heartbeat_s, options.return_deadline_s / 4))
            try:
                if self._grant is not None and self._line is not None:
                    await self._pass_on(self._with_news(self._grant))
            except FencedError:
                return
            except LastgoodError as error:
                log.warning("a beat to the members failed: %s", error)

    # -- close

    async def close(
        self, member: MemberId, membership: str, last_step: int, save_last: bool, timeout_s: float
    ) -> tuple[DrainOutcome, bool]:
        """One rank has ended its loop. Once all have: the last step is committed and everything is durable.

        Answers how that came out, and whether this member is the one that ends the service. Raises SaveFailedError
        when the last step could not be committed, DeadlineError naming who did not call close().
        """
        self._check_member(member, membership)
        self._drop_replaced()
        if self._closing is None:
            self._closing = self._new_together()
            self._closing.work = self._service.background(self._close(self._closing, timeout_s))
        slot = self._closing
        drained = await self._together(slot, member, membership, (last_step, save_last), timeout_s, "close()")
        return drained, member == min(slot.asked)

    async def _close(self, slot: _Together, timeout_s: float) -> None:
        try:
            while not slot.answer.done():
                gone = self._gone()
                if all(member in slot.asked or str(member) in gone for member in self._expected()):
                    slot.answer.set_result(await self._finish(slot, timeout_s))
                    return
                await asyncio.sleep(POLL_S)
        except Exception as error:  # noqa: BLE001 - it belongs to those who asked
            if not slot.answer.done():
                slot.answer.set_exception(error)
        finally:
            self._finishing = False
            if self._closing is not slot:
                pass  # other processes have joined since
            elif not slot.answer.done() or slot.answer.exception() is not None or not slot.answer.result().drained:
                self._closing = None  # nothing was ended: it may be asked again, and training may go on

    def _gone(self) -> set[str]:
        """Members that will not ask any more. Those whose stager or coordinator was restarted register again."""
        missing = set(self._service.nodes.missing().members)
        now_s = time.monotonic()
        self._missing_since = {name: self._missing_since.get(name, now_s) for name in missing}
        limit_s = self._service.options.return_deadline_s
        returning = set(self._service.nodes.returning()) if now_s - self._booted_s > limit_s else missing
        return {name for name in missing if name not in returning or now_s - self._missing_since[name] > limit_s}

    async def _finish(self, slot: _Together, timeout_s: float) -> DrainOutcome:
        self._finishing = True
        save_last = all(save for _, save in slot.asked.values())
        step = max(last for last, _ in slot.asked.values())
        if save_last and any(last != step for last, _ in slot.asked.values()):
            told = ", ".join(f"{member} after step {last}" for member, (last, _) in sorted(slot.asked.items()))
            raise SaveFailedError(
                f"close() was called by {told}: the last step cannot be saved, since there is none that all have "
                "ended. The previous checkpoint stands; nothing was ended. Call close(save_last=False) on every rank "
                "to end without it.",
            )
        await self._driver.settle(self._left_s(slot, timeout_s))
        line = self._line
        if line is None and self._heard is not None and self._heard.line.crew == self._crew:
            line = self._heard.line
        progress = Progress()
        if line is not None and save_last and step > line.step:
            saved = self._service.saved_before(step, Progress(newest=line.after))
            progress = Progress(last_step=step, saved=saved)
            if saved is None:
                await self._service.reopen(step)
        return await self._service.finish(self._left_s(slot, timeout_s), ulid(), progress)

    async def end(self) -> None:
        """The lowest member ends the service, once the others have left."""
        until = time.monotonic() + LEAVE_S
        while self._service.nodes.count_members() and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
            await self._service.nodes.refresh()
        await self._service.end()

    def check_counts(self, member: MemberId, membership: str, crew: tuple[str, ...]) -> None:
        """Raises MembershipError when a rank is not led any more, since others have joined."""
        self._check_member(member, membership)
        if crew != self._crew:
            raise MembershipError(
                f"{member}: members of roles {', '.join(sorted(self._roles))} of run {self._service.options.run} have "
                "joined since the last resume, so nothing is saved. Call resume() on every rank of every role, after "
                "all have joined.",
                member=str(member),
            )

    def _check_member(self, member: MemberId, membership: str) -> None:
        declared = self._roles.get(member.role)
        if declared is None or declared.membership != membership:
            raise MembershipError(
                f"{member} is no longer a member of run {self._service.options.run}: other processes have joined as "
                f"role {member.role} since. Nothing was touched. End this process.",
                member=str(member),
            )
