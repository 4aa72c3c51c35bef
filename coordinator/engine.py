"""The engine of the driver: feeds the core, runs its commands, keeps its timer, tells those who wait.

The rule: `_feed` is the one way into the core. No task is left unobserved; a failure of the world comes back as an
event, never as an exception out of a task; a defect (IllegalMoveError) is kept in `faults`, logged and told by status.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from ..storage.errors import FencedError, IllegalMoveError, LastgoodError, StoreUnavailableError, UsageError
from ..storage.lanes import Lane
from ..storage.store import Store
from . import commands as cmd
from . import events as ev
from .catalog import Checkpoint
from .holdings import Holdings
from .messages import SaveState
from .outcomes import SaveOutcome
from .ports import ParticipantPort
from .protocol import Protocol, Settings
from .remote import Remote, Survey
from .runner import Runner

log = logging.getLogger("lastgood.coordinator")

T = TypeVar("T")
_KEEP_OUTCOMES = 2000
_KEEP_ALARMS = 20
STORE_THREADS = 4


class Engine:
    """The core at work on one event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        store: Store | None,
        new_attempt_id: Callable[[], str],
        clock: Callable[[], float],
        now_utc: Callable[[], str],
        versions: Mapping[str, str] | None = None,
        blocking: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None,
        home: str | None = None,
    ) -> None:
        """`store` None: nothing is uploaded. `clock`: monotonic seconds. `now_utc`: the wall clock as ids.utc_text.

        `versions` go into manifests. `blocking` runs a blocking function off the loop (default: four own threads for
        the store, one for the rest). `home`: see Remote.
        """
        if store is None:
            settings = dataclasses.replace(settings, upload=False)
        self.settings = settings
        self.core = Protocol(settings, lambda epoch, sequence: new_attempt_id())
        self.faults: list[str] = []
        self.alarms: deque[str] = deque(maxlen=_KEEP_ALARMS)
        self.untold_alarms: list[str] = []  # whoever tells them to the run clears them
        self._clock = clock
        self._store_lane = Lane(f"the store {'' if store is None else store.url}", STORE_THREADS, StoreUnavailableError)
        self._work_lane = Lane("the coordinator", 1, LastgoodError)
        self._blocking = blocking if blocking is not None else self._at_store
        building = blocking if blocking is not None else self._at_work
        self._ports: dict[str, ParticipantPort] = {}
        self._remote = None if store is None else Remote(store, settings.run, now_utc, home)
        self._runner = Runner(settings, self._ports, self._remote, now_utc, versions or {}, self._blocking, building)
        self._holdings = Holdings()
        self._survey = Survey()
        self._catalog: list[Checkpoint] | None = None  # as long as nothing of what it is made from has changed
        self._outcomes: dict[str, SaveOutcome] = {}
        self._verdict: cmd.WindowVerdict | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._window_lock = asyncio.Lock()
        self._hellos = itertools.count()
        self._last_hello: dict[str, int] = {}
        self._stopped = False
        self.rises = 0  # announcements so far that something was committed or became durable
        self.on_announce: list[Callable[[cmd.Announce], None]] = []  # called for every announcement; must not raise

    async def stop(self) -> None:
        """Ends every task of the driver; whatever stands on disk stays for the next coordinator."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, future in self._watchers:
            if not future.done():
                future.set_result(None)  # whoever waits is told by _check_alive
        self._store_lane.close()
        self._work_lane.close()

    def _check_alive(self) -> None:
        if self.core.fenced is not None:
            raise FencedError(
                f"the coordinator of epoch {self.settings.epoch} has been replaced: {self.core.fenced}. Nothing was "
                "changed; talk to the newer one.",
                epoch=self.settings.epoch,
            )
        if self._stopped:
            raise UsageError(f"the coordinator of epoch {self.settings.epoch} has ended; ask the next one.")

    def _feed(self, event: ev.Event) -> None:
        """The one way into the core: takes the event in, starts what comes of it, wakes whoever waits."""
        if self._stopped:
            return
        if isinstance(event, (ev.NodeHeard, ev.NodeLost)):
            self._catalog = None
        try:
            commands = self.core.handle(event, self._clock())
        except IllegalMoveError as error:
            self._keep_fault(str(error))
            log.exception("a defect: the protocol was told something that cannot be")
            raise
        if self._holdings.note(event, self.core):
            self._catalog = None
        if isinstance(event, ev.CompletedRemotely):
            self._note_completed(event.attempt)
        for command in commands:
            if isinstance(command, cmd.Announce):
                self._announced(command)
            elif isinstance(command, cmd.Alarm):
                log.error("step %d: ALARM: %s", command.head.step, command.sentence)
                self.alarms.append(command.sentence)
                self.untold_alarms.append(command.sentence)
            elif isinstance(command, cmd.WindowVerdict):
                self._verdict = command
            else:
                assert isinstance(command, cmd.AttemptCommand)
                self._spawn(command)
        self._set_timer()
        for watcher in list(self._watchers):
            if watcher[0]() and not watcher[1].done():
                watcher[1].set_result(None)

    def _spawn(self, command: cmd.AttemptCommand) -> None:
        task = asyncio.get_running_loop().create_task(self._perform(command))
        self._tasks.add(task)
        task.add_done_callback(self._performed)

    async def _perform(self, command: cmd.AttemptCommand) -> None:
        self._feed(await self._runner.run(command))

    def _keep_fault(self, sentence: str) -> None:
        self.faults.append(sentence)
        self.untold_alarms.append(f"a defect of lastgood: {sentence}")

    def _performed(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, IllegalMoveError):  # those are kept by _feed
            self._keep_fault(f"{type(error).__name__}: {error}")
            log.error("a defect in the driver", exc_info=error)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_s = self.core.next_wakeup_s()
        if wake_s < math.inf:
            delay_s = max(0.001, wake_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._feed(ev.Tick())

    async def _until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until the predicate holds after some event; False when `timeout_s` passed first."""
        if predicate():
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watcher = (predicate, future)
        self._watchers.append(watcher)
        try:
            await asyncio.wait_for(future, None if timeout_s == math.inf else max(0.0, timeout_s))
        except asyncio.TimeoutError:
            return predicate()
        finally:
            if watcher in self._watchers:
                self._watchers.remove(watcher)
        return predicate() if self._stopped else True

    async def _at_store(self, work: Callable[[], T]) -> T:
        """A call to the store; it may hang without holding up anything but calls to the store."""
        return await self._store_lane.run("a call of the coordinator", work, self.settings.deadlines.remote_s)

    async def _at_work(self, work: Callable[[], T]) -> T:
        return await self._work_lane.run("drawing up a manifest", work, self.settings.deadlines.accept_s)

    def _announced(self, announce: cmd.Announce) -> None:
        head = announce.head
        self.rises += announce.state in (SaveState.COMMITTED, SaveState.DURABLE)
        for request_id in announce.request_ids:
            self._outcomes.pop(request_id, None)
            self._outcomes[request_id] = SaveOutcome(
                request_id,
                announce.state,
                attempt=head.attempt if head else None,
                step=head.step if head else None,
                epoch=head.epoch if head else None,
                sequence=head.sequence if head else None,
                kind=announce.kind,
                tag=announce.tag,
                blame=announce.blame,
                waits_for=announce.waits_for,
                in_doubt=announce.in_doubt,
                stop=announce.stop,
                stall_s=announce.stall_s,
            )
        while len(self._outcomes) > _KEEP_OUTCOMES:
            del self._outcomes[next(iter(self._outcomes))]
        if head is not None:
            where = f"step {head.step}, attempt {head.attempt}"
            if announce.blame is not None and announce.request_ids:
                log.error("%s: %s: %s", where, "in doubt" if announce.in_doubt else "failed", announce.blame)
            else:
                log.info("%s: %s", where, announce.state.value)
        for tell in self.on_announce:
            tell(announce)

    def _outcome(self, request_id: str) -> SaveOutcome:
        outcome = self._outcomes[request_id]
        attempt = self.core.attempts.get(outcome.attempt or "")
        return outcome if attempt is None else dataclasses.replace(outcome, story=tuple(attempt.story))

    def _note_completed(self, attempt_id: str) -> None:
        """The store's list as of the last survey, plus what was completed since."""
        attempt = self.core.attempts.get(attempt_id)
        if attempt is None or attempt.manifest is None:
            return
        completed = self._runner.completed_of(attempt.manifest, attempt_id)
        if all(known.attempt != attempt_id for known in self._survey.completed):
            self._learn(dataclasses.replace(self._survey, completed=(*self._survey.completed, completed)))

    def _learn(self, survey: Survey) -> None:
        """What the store holds now."""
        self._survey = survey
        self._catalog = None
