"""The driver: runs the protocol core's commands against one port per node and the store, and feeds back what came.

The rule: the core decides, the driver waits. Everything runs on one event loop; blocking work (the store, building a
manifest) goes to threads. This part is what the service calls; the loop itself is in engine.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..storage.errors import (
    DeadlineError,
    FencedError,
    IntegrityError,
    ResumeError,
    StagingError,
    StoreError,
    UsageError,
)
from ..storage.manifest import Completed, Manifest
from . import catalog
from . import commands as cmd
from . import events as ev
from .answers import member_of
from .catalog import Checkpoint
from .engine import Engine
from .messages import (
    AttemptHead,
    Blame,
    Inventory,
    MemberId,
    MemberInfo,
    NodeSnapshot,
    RoleDeclaration,
    SaveRequest,
    SaveState,
)
from .outcomes import DrainOutcome, SaveOutcome, WindowOutcome, reached
from .policies import Decision
from .ports import ParticipantPort
from .report import improving, lagging, report, settled
from .runner import answer_within
from .story import Story, stories

if TYPE_CHECKING:
    from .restore import Candidate

log = logging.getLogger("lastgood.coordinator")

T = TypeVar("T")


class Driver(Engine):
    """One incarnation of the coordinator at work. All methods on ONE event loop."""

    # ---- nodes and members

    async def add_node(self, port: ParticipantPort) -> Inventory:
        """Says hello (with my epoch and the declarations) and takes the node in; also to hear a node again.

        Call it again whenever a stager has (re)started, a partition healed or registrations changed. Raises
        FencedError, DeadlineError after call_s, or what the port raised.
        """
        self._check_alive()
        number = next(self._hellos)
        declarations = tuple(self.core.membership.declarations.values())
        asked_s = self._clock()
        asked = self._holdings.ask()
        call = port.hello(self.settings.epoch, declarations)
        try:
            who = getattr(port, "name", "a stager")
            inventory = await answer_within(call, self.settings.deadlines.call_s, who, "hello")
            return self._take_in(port, inventory, number, asked, asked_s)
        except FencedError as error:
            self._feed(ev.Fenced(str(error)))
            raise
        finally:
            self._holdings.answered(asked)

    def _take_in(
        self, port: ParticipantPort, inventory: Inventory, number: int, asked: int, asked_s: float
    ) -> Inventory:
        node = inventory.node
        if self._last_hello.get(node, -1) > number:
            return inventory  # a hello that was sent later has been answered already
        self._last_hello[node] = number
        self._ports[node] = port
        self._holdings.hear(inventory, asked)
        self._feed_requests(inventory)
        self._feed(ev.NodeHeard(inventory, asked_s))
        self._check_alive()
        return inventory

    def _feed_requests(self, inventory: Inventory) -> None:
        for found in inventory.attempts:
            if found.manifest is None or found.attempt in self.core.attempts:
                continue
            try:
                requests = Manifest.from_bytes(found.manifest, where=f"{inventory.node}/{found.attempt}").requests
            except IntegrityError as error:
                log.warning("%s", error)
                continue
            if requests:
                self._feed(ev.ServedBefore(found.attempt, requests))

    def lose_node(self, node: str, reason: str) -> None:
        """The node's stager is dead or out of reach; it is unheard until add_node."""
        self._holdings.lose(node)
        self._feed(ev.NodeLost(node, reason))

    def declare(self, declaration: RoleDeclaration) -> None:
        """A role of the run, as the last add_members call declared it; replaces the earlier one of that name.

        Stagers learn it at the next hello.
        """
        self._feed(ev.Declared(declaration))

    def register(self, node: str, members: Sequence[MemberInfo]) -> None:
        """The members that the agents on `node` registered, all of them, whenever that changes."""
        self._feed(ev.MembersChanged(node, tuple(members)))

    def drop_member(self, member: MemberId, reason: str) -> None:
        """The member's process died: an attempt that still needs its copy is aborted at once, naming it."""
        self._feed(ev.MemberDropped(member, reason))

    def resumed_from(self, head: AttemptHead | None) -> None:
        """The run's live state came from this checkpoint: the parent of the next manifest."""
        self._feed(ev.Resumed(head))

    def drop_memory(self, reason: str) -> None:
        """The snapshot that is held in memory, if there is one, is not needed any more."""
        self._feed(ev.MemoryDropped(reason))

    # ---- recovery

    async def recover(self, expected_nodes: Iterable[str] = ()) -> tuple[str, ...]:
        """Reads the store, then decides every attempt of lower epochs by the table of DESIGN section 4.

        Call it once, after the first add_nodes; nodes heard later are worked in by add_node. Answers one sentence for
        each attempt that was not over everywhere, and for what could not be read. `expected_nodes`: nodes that may
        hold attempts, beyond those that were heard or that manifests name.
        """
        self._check_alive()
        told = [*await self._look_at_store(), *map(str, self._survey.problems), *await self._forward_pointers()]
        known = {node for entry in self._survey.ledger for node in entry.nodes}
        known |= {node for attempt in self.core.attempts.values() for node in attempt.participants}
        self._feed(ev.RecoveryBegun(frozenset(expected_nodes) | known, time.time()))
        for attempt in sorted(self.core.attempts.values(), key=lambda a: a.order):
            if not attempt.mine and not attempt.over_everywhere:
                last = attempt.story[-1][1] if attempt.story else attempt.phase.value
                told.append(f"step {attempt.head.step}, attempt {attempt.id}: {last}")
        return tuple(told)

    async def _look_at_store(self) -> list[str]:
        """Reads what the store holds; answers why it could not be read, if so."""
        if self._remote is None:
            return []
        remote = self._remote
        try:
            limit_s = self.settings.deadlines.remote_s
            survey = await answer_within(self._blocking(remote.survey), limit_s, "the store", "what it holds")
        except (StoreError, OSError, DeadlineError) as error:
            return [f"the store could not be read ({error}); what it knows is not taken into account until it can be"]
        self._learn(survey)
        self._feed(ev.StoreSurveyed(_heads(survey.completed), _heads(survey.ledger)))
        return []

    async def _forward_pointers(self) -> list[str]:
        """The store's pointers follow its commits; whoever made those may have died in between."""
        if self._remote is None or not self._survey.completed:
            return []
        forward = functools.partial(self._remote.forward_pointers, self._survey.completed)
        try:
            limit_s = self.settings.deadlines.remote_s
            await answer_within(self._blocking(forward), limit_s, "the store", "its pointers")
        except (StoreError, OSError, DeadlineError) as error:
            return [f"the pointers in the store stay as they are for now ({error}); they are hints"]
        return []

    async def settle(self, timeout_s: float) -> bool:
        """Waits until nothing is in the foreground and every decision that can be made with the nodes heard is made
        and published there; False when the time was up first."""
        self._check_alive()
        return await self._until(lambda: settled(self.core), timeout_s)

    # ---- windows

    async def open_window(
        self,
        step: int,
        metrics: Mapping[str, float] | None = None,
        due: Decision | None = None,
        memory: Decision | None = None,
        still: Callable[[], None] = lambda: None,
    ) -> WindowOutcome:
        """Marks the end of `step` at every node with members; returns once training may go on.

        That is at once when nothing is due, else when what is due has been copied (or has failed); when copies overlap,
        when the copy has begun. `memory`: whether
        a snapshot is to be kept in memory when no save is due. `still` raises when the step is not that of the members
        that are declared now; it is asked when they are marked, and when they have answered. Raises FencedError.
        """
        return await self._open_window(self._mark, step, metrics or {}, due, memory, still)

    async def reopen_window(
        self,
        step: int,
        metrics: Mapping[str, float] | None = None,
        due: Decision | None = None,
        memory: Decision | None = None,
    ) -> WindowOutcome:
        """As open_window where every member has marked the end of `step` already: captures nothing anew.

        After a restart, and when the members lead the run.
        """
        return await self._open_window(self._reopen, step, metrics or {}, due, memory)

    async def miss_window(self, step: int, due: Decision, blame: Blame, *, again: bool = False) -> WindowOutcome:
        """The end of `step` could not be marked everywhere: a save that was due has failed, and so have requests that
        waited for it."""
        self._check_alive()
        async with self._window_lock:
            self._verdict = None
            self._feed(
                ev.WindowOpened(step, {}, {blame.node or "unknown": blame}, due, {}, ends_waiting=True, again=again)
            )
            self._check_alive()
            verdict = self._last_verdict()
            return WindowOutcome(step, False, verdict.blame, (), verdict.stop)

    async def forget_window(self) -> None:
        """Training goes on past the open window: a later request waits for the next one. Asks no member."""
        self._check_alive()
        async with self._window_lock:
            await self._until(lambda: not self.core.copying, math.inf)
            self._check_alive()
            self._feed(ev.WindowClosed())

    async def _open_window(
        self,
        ask: Callable[[int, float, ParticipantPort], Awaitable[NodeSnapshot]],
        step: int,
        metrics: Mapping[str, float],
        due: Decision | None,
        memory: Decision | None = None,
        still: Callable[[], None] = lambda: None,
    ) -> WindowOutcome:
        self._check_alive()
        async with self._window_lock:
            if self.settings.overlapped:  # a step without an update: nothing has held it back
                await self._until(lambda: not self.core.copying, math.inf)
                self._check_alive()
            still()
            left_s, began_s = self.settings.deadlines.mark_s, self._clock()
            nodes = self.core.membership.nodes()
            mark = functools.partial(ask, step, left_s)
            answers = await self._everywhere(nodes, f"the end of step {step}", mark, left_s)
            reports = {node: answer for node, answer in answers.items() if isinstance(answer, NodeSnapshot)}
            failures = {
                node: self._blame(node, answer, self._clock() - began_s)
                for node, answer in answers.items()
                if isinstance(answer, BaseException)
            }
            still()  # others may have been declared meanwhile: they have answered for a step that they never made
            self._verdict = None
            self._feed(ev.WindowOpened(step, reports, failures, due, dict(metrics), memory))
            self._check_alive()
            verdict = self._last_verdict()
            if not verdict.opened:
                return WindowOutcome(step, False, verdict.blame, (), verdict.stop)
            await self._until(lambda: not self.core.holds_training, math.inf)
            await self._until_copying()
            self._check_alive()
            saves = tuple(self._outcome(i) for i in verdict.request_ids if i in self._outcomes)
            return WindowOutcome(step, True, None, saves, any(save.stop for save in saves))

    async def _until_copying(self) -> None:
        """Returns once no update can change what an overlapped snapshot copies, or nothing is copied any more."""
        front = self.core.foreground
        if front is None or not self.core.copying:
            return
        left_s = self.settings.deadlines.snapshot_s
        call = functools.partial(self._copying, head=front.head, left_s=left_s)
        begun = asyncio.ensure_future(self._everywhere(front.participants, "whether its copy has begun", call, left_s))
        ended = self._until(lambda: self.core.foreground is not front or not self.core.copying, math.inf)
        over = asyncio.ensure_future(ended)
        await asyncio.wait({begun, over}, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (begun, over):
            waiting.cancel()
        await asyncio.gather(begun, over, return_exceptions=True)

    async def close_window(self) -> None:
        """Before the next update: no copy runs when it returns, and none starts before the next open_window.

        A copy that is under way is waited for. Raises FencedError.
        """
        self._check_alive()
        async with self._window_lock:
            await self._until(lambda: not self.core.copying, math.inf)
            self._check_alive()
            self._feed(ev.WindowClosed())
            left_s = self.settings.deadlines.mark_s
            close = functools.partial(self._close, left_s=left_s)
            answers = await self._everywhere(self.core.membership.nodes(), "the window's end", close, left_s)
            for node, answer in answers.items():
                if isinstance(answer, BaseException):
                    log.warning("%s did not close its window: %s", node, _say(answer))
            self._check_alive()

    def _blame(self, node: str, error: BaseException, waited_s: float) -> Blame:
        """Why a node could not be marked; its only member is named even when the error names none."""
        member = member_of(error)
        members = self.core.membership.members_on(node)
        if member is None and len(members) == 1:
            member = members[0]
        hosts = f" (it hosts {', '.join(map(str, members[:8]))})" if member is None and members else ""
        return Blame("window", f"{_say(error)}{hosts}", node, member, waited_s)

    def _last_verdict(self) -> cmd.WindowVerdict:
        assert self._verdict is not None, "the core answered WindowOpened without a verdict"
        return self._verdict

    async def _mark(self, step: int, left_s: float, port: ParticipantPort) -> NodeSnapshot:
        return await port.mark(self.settings.epoch, step, left_s)

    async def _reopen(self, step: int, left_s: float, port: ParticipantPort) -> NodeSnapshot:
        return await port.reopen(self.settings.epoch, step, left_s)

    async def _copying(self, port: ParticipantPort, head: AttemptHead, left_s: float) -> None:
        await port.copying(self.settings.epoch, head, left_s)

    async def _close(self, port: ParticipantPort, left_s: float) -> None:
        await port.close_window(self.settings.epoch, left_s)

    async def _everywhere(
        self, nodes: Iterable[str], what: str, call: Callable[[ParticipantPort], Awaitable[T]], left_s: float
    ) -> dict[str, T | BaseException]:
        """Asks all these nodes at once and hears every one of them; a FencedError ends this coordinator."""
        asked = list(nodes)

        async def one(node: str) -> T:
            port = self._ports.get(node)
            if port is None or node not in self.core.heard:
                raise StagingError(f"the stager of node {node} is not heard: it died, or its node is gone")
            return await answer_within(call(port), left_s + 1.0, f"the stager of node {node}", what)

        results = await asyncio.gather(*(one(node) for node in asked), return_exceptions=True)
        for result in results:
            if isinstance(result, FencedError):
                self._feed(ev.Fenced(str(result)))
        self._check_alive()
        return dict(zip(asked, results, strict=True))

    # ---- requests

    async def save(self, request: SaveRequest) -> SaveOutcome:
        """Takes a request in; returns at once: with its attempt, or with `waits_for` when deferred, or failed.

        The same request id is served once, however often it is sent. Raises FencedError.
        """
        self._check_alive()
        self._feed(ev.Asked(request, time.time()))
        self._check_alive()
        return self._outcome(request.request_id)

    async def wait(self, request_id: str, state: SaveState, timeout_s: float) -> SaveOutcome:
        """Waits until the request has reached `state`, has failed, or the time is up (then the outcome so far).

        Raises UsageError for an id never seen (send the save again after a restart), FencedError once fenced.
        """
        if request_id not in self._outcomes:
            self._check_alive()
            raise UsageError(
                f"the coordinator of epoch {self.settings.epoch} knows no request {request_id}. Send the save again "
                "with the same id: it is served once.",
                request_id=request_id,
            )

        def over() -> bool:
            outcome = self._outcomes[request_id]
            return self.core.fenced is not None or outcome.failed or reached(outcome.state, state)

        await self._until(over, timeout_s)
        outcome = self._outcome(request_id)
        if not reached(outcome.state, state):
            self._check_alive()
        return outcome

    async def drain(self, timeout_s: float) -> DrainOutcome:
        """Waits until nothing is in the foreground and everything committed is durable (committed, without a store)."""
        self._check_alive()
        await self._until(lambda: not improving(self.core), timeout_s)
        left = lagging(self.core)
        return DrainOutcome(not left, tuple(left))

    # ---- reports

    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint known, newest (epoch, sequence) first."""
        if self._catalog is None:
            survey, holdings = self._survey, self._holdings
            self._catalog = catalog.merge(
                holdings.of(self.core.heard), survey.completed, survey.ledger, survey.collected, holdings.words
            )
        return list(self._catalog)

    def fence(self, reason: str) -> None:
        """A newer coordinator leads the run. Raises FencedError, as every later call does."""
        self._feed(ev.Fenced(reason))
        self._check_alive()

    def collected(self, head: AttemptHead) -> None:
        """Retention has deleted this checkpoint in the store: a tombstone stands there, and nobody is offered it."""
        survey, attempt = self._survey, head.attempt
        if (remembered := self.core.attempts.get(attempt)) is not None:
            remembered.tell(self._clock(), "collected: newer checkpoints are kept instead (save_total_limit)")
        self._learn(
            dataclasses.replace(
                survey,
                completed=tuple(entry for entry in survey.completed if entry.attempt != attempt),
                ledger=tuple(entry for entry in survey.ledger if entry.attempt != attempt),
                collected=survey.collected | {attempt},
                half_collected=tuple(head for head in survey.half_collected if head.attempt != attempt),
            )
        )

    def collected_at(self, node: str, head: AttemptHead) -> None:
        """A node holds nothing of a collected checkpoint any more."""
        self._holdings.forget(node, head.attempt)

    def leftovers(self) -> dict[str, list[AttemptHead]]:
        """Node -> collected checkpoints that it still holds: it was away or did not answer; collect them there."""
        left: dict[str, list[AttemptHead]] = {}
        for node, attempts in self._holdings.of(self.core.heard).items():
            for found in attempts:
                if found.attempt in self._survey.collected and found.completed:
                    left.setdefault(node, []).append(found.head)
        return left

    def half_collected(self) -> list[AttemptHead]:
        """Checkpoints that were collected in the store by a coordinator that died before it was done."""
        return list(_heads(self._survey.half_collected))

    async def candidates(self, mode: int | str) -> tuple[list[Candidate], list[str]]:
        """What a resume may try, newest first, and a sentence for each newer commit that cannot be had.

        `mode`: 'auto', 'latest' or a step's number. The store is read anew; what of it is not used makes a sentence
        too, unless it is older than what is tried first. A manifest that cannot be read makes no candidate. Raises
        ResumeError for 'auto' and 'latest' when the store holds anything of another format version.
        """
        from .restore import Candidate  # restore.py is the larger part; only a resume needs it

        self._check_alive()
        unread = await self._look_at_store()
        problems = self._survey.problems
        for problem in problems:
            log.warning("%s", problem)
        if mode in ("auto", "latest"):
            self._refuse_other_versions(mode)
        usable, lost = catalog.candidates(self.checkpoints(), mode, problems)
        found: list[Candidate] = []
        for checkpoint in usable:
            manifest = checkpoint.manifest
            if manifest is None:
                manifest, why = await self._fetch_manifest(checkpoint)
                if why is not None:
                    log.warning("%s", why)
                    lost += [] if found else [why]  # something newer is tried first
            if manifest is not None:
                found.append(Candidate(manifest, f"{checkpoint} on {', '.join(checkpoint.where)}"))
        return found, [*lost, *unread]

    def _refuse_other_versions(self, mode: str) -> None:
        """A rolled-back image must not go on from what it happens to understand: the run is further than that."""
        others = [problem for problem in self._survey.problems if problem.other_version]
        if others:
            more = f" The same holds for {len(others) - 1} more objects." if len(others) > 1 else ""
            raise ResumeError(
                f"run {self.settings.run} has checkpoints of another format version: {others[-1]}{more} resume="
                f"{mode!r} does not pass over them, and no state was touched: resume with that lastgood, or name "
                "a step or a path to go on from, and lose what is newer.",
                rejected=tuple(map(str, others)),
            )

    async def _fetch_manifest(self, checkpoint: Checkpoint) -> tuple[bytes | None, str | None]:
        """The manifest in the store, or a sentence that says why it is not had."""
        completed = next((c for c in self._survey.completed if c.attempt == checkpoint.attempt), None)
        if self._remote is None or completed is None:
            return None, f"{checkpoint}: no manifest was found."
        read = functools.partial(self._remote.read_manifest, completed)
        try:
            limit_s = self.settings.deadlines.remote_s
            return await answer_within(self._blocking(read), limit_s, "the store", "a manifest"), None
        except (StoreError, IntegrityError, OSError, DeadlineError) as error:
            return None, f"{checkpoint}: its manifest could not be read from the store: {_say(error)}"

    def status(self) -> dict[str, Any]:
        """JSON-able: epoch, fenced, window, members missing, nodes heard, attempts under way, alarms, faults."""
        return {**report(self.core), "alarms": list(self.alarms), "faults": list(self.faults)}

    def stories(self, step: int, utc: Callable[[float], str]) -> tuple[Story, ...]:
        """Every attempt of a step, oldest first. `utc` turns this driver's clock into text."""
        return stories(self.core, self.checkpoints(), step, utc, self._survey.collected)

    async def changed(self, seen: Mapping[str, bool], timeout_s: float) -> list[Checkpoint]:
        """Committed checkpoints that are not in `seen` (attempt -> durable) or have become durable; oldest first.

        Waits for the first of them, `timeout_s` at most.
        """
        self._check_alive()

        def news() -> list[Checkpoint]:
            return [c for c in self.checkpoints() if c.committed and seen.get(c.attempt) not in (c.durable, True)]

        looked_at = -1

        def any_news() -> bool:
            nonlocal looked_at
            if self.rises == looked_at:
                return False  # the list is long; look at it only after something was committed or became durable
            looked_at = self.rises
            return bool(news())

        await self._until(lambda: self.core.fenced is not None or any_news(), timeout_s)
        self._check_alive()
        return news()[::-1]

    def fingerprint(self) -> dict[str, Any]:
        """What a manifest written now would say of the run; empty while members are missing."""
        if self.core.membership.problems():
            return dict(self.settings.fingerprint)
        return {**self.settings.fingerprint, **self.core.membership.roster().fingerprint}


def _heads(entries: Iterable[Completed] | Iterable[Any]) -> tuple[AttemptHead, ...]:
    return tuple(AttemptHead(entry.attempt, entry.step, entry.epoch, entry.sequence) for entry in entries)


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
