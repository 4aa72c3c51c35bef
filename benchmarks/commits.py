"""Whole happy-path commits of a fleet, led by the real parts of the coordinator. Counts, and CPU seconds per commit.

`HandDriven` feeds the pure core by hand, with or without the work around it that costs CPU (building the manifest,
reading it for COMPLETED and before the store's COMPLETED). `led` runs the whole Service on an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.answers import success
from lastgood.coordinator.messages import AttemptHead, AttemptInventory, Progress, RecordState
from lastgood.coordinator.moves import Phase
from lastgood.coordinator.options import Options
from lastgood.coordinator.ownership import Identity
from lastgood.coordinator.policies import Decision
from lastgood.coordinator.ports import Notice
from lastgood.coordinator.protocol import Protocol, Settings
from lastgood.coordinator.remote import Remote
from lastgood.coordinator.runner import Runner
from lastgood.coordinator.service import Service
from lastgood.storage.errors import StoreUnavailableError
from lastgood.storage.lanes import Lane
from lastgood.storage.manifest import Manifest

from .fleet import Fleet, FleetPort, FleetStore, at_once

NOW_UTC = "2026-01-01T00:00:00Z"
VERSIONS = {"lastgood": "0.1.0", "python": "3.11"}


@dataclass
class Cost:
    """What one commit (or step, or recovery) came to."""

    cpu_s: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    manifest_bytes: int = 0  # of one manifest
    phases_s: dict[str, float] = field(default_factory=dict)  # CPU by what was done

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.process_time()
        try:
            yield
        finally:
            self.phases_s[what] = self.phases_s.get(what, 0.0) + time.process_time() - began


class HandDriven:
    """The pure core, fed by hand. One command is answered after the other, in the order in which they came."""

    def __init__(self, fleet: Fleet, *, manifests: bool) -> None:
        """`manifests`: also builds and reads them for real, as the runner and the store's part do."""
        self.fleet = fleet
        self.manifests = manifests
        self.now_s = 0.0
        self.cost = Cost()
        self.manifest = b""  # the last that was built
        self.core = Protocol(Settings("run", epoch=5), lambda epoch, sequence: f"a{epoch}.{sequence}")
        self._remote = Remote(FleetStore(), "run", lambda: NOW_UTC)
        self._runner = Runner(self.core.settings, {}, self._remote, lambda: NOW_UTC, VERSIONS, at_once)
        self._asked: deque[cmd.AttemptCommand] = deque()

    def feed(self, event: ev.Event) -> None:
        self.now_s += 1e-6
        out = self.core.handle(event, self.now_s)
        self.core.next_wakeup_s()  # the engine sets its timer after every event
        self.cost.events[type(event).__name__] += 1
        for command in out:
            self.cost.commands[type(command).__name__] += 1
            if isinstance(command, cmd.AttemptCommand):
                self._asked.append(command)

    def meet(self, attempts: tuple[AttemptInventory, ...] = ()) -> None:
        """Every node is heard, then recovery begins."""
        for declaration in self.fleet.declarations:
            self.feed(ev.Declared(declaration))
        for node in self.fleet.nodes:
            self.feed(ev.NodeHeard(self.fleet.inventory(node, 5, attempts)))
        self.feed(ev.RecoveryBegun(frozenset(self.fleet.nodes)))

    def answer_all(self) -> None:
        while self._asked:
            command = self._asked.popleft()
            self.feed(self.answer(command))

    def answer(self, command: cmd.AttemptCommand) -> ev.Event:
        """What comes of a command."""
        return success(command, self._result(command))

    def _result(self, command: cmd.AttemptCommand) -> Any:
        if isinstance(command, cmd.Snapshot):
            return self.fleet.snapshot(command.node, command.head.step)
        if isinstance(command, cmd.Stage):
            return self.fleet.shards[command.node]
        if isinstance(command, cmd.Accept):
            return RecordState.ACCEPT
        if isinstance(command, cmd.Refuse):
            return RecordState.REFUSE
        if isinstance(command, cmd.BuildManifest):
            if not self.manifests:
                return b"the manifest"
            with self.cost.timed("build manifest"):
                data = self._runner.build(command.draft, NOW_UTC)
            self.cost.manifest_bytes = len(data)
            self.manifest = data
            return data
        if isinstance(command, (cmd.Publish, cmd.WriteLedger, cmd.CompleteRemotely)) and self.manifests:
            return self._use_manifest(command)
        return None

    def _use_manifest(self, command: cmd.Publish | cmd.WriteLedger | cmd.CompleteRemotely) -> None:
        attempt, manifest = command.head.attempt, command.manifest
        with self.cost.timed("make COMPLETED"):
            completed = self._runner.completed_of(manifest, attempt)
        if isinstance(command, cmd.CompleteRemotely):
            with self.cost.timed("verify in the store"):
                self._remote.complete(completed, manifest, self._runner.content(manifest, attempt))

    def commit(self, step: int) -> Cost:
        """One save of `step` from its window to durable everywhere."""
        reports = {node: self.fleet.snapshot(node, step, 0) for node in self.fleet.nodes}
        self.cost = Cost()
        began = time.process_time()
        self.feed(ev.WindowOpened(step, reports, due=Decision(True, "every step")))
        self.answer_all()
        self.cost.cpu_s = time.process_time() - began
        newest = max(self.core.attempts.values(), key=lambda attempt: attempt.order)
        assert newest.phase is Phase.DURABLE and newest.finished and newest.head.step == step, newest.story
        return self.cost

    def step(self, step: int) -> Cost:
        """An end_step with nothing due."""
        reports = {node: self.fleet.snapshot(node, step, 0) for node in self.fleet.nodes}
        self.cost = Cost()
        began = time.process_time()
        self.feed(ev.WindowOpened(step, reports, due=Decision(False, "not due")))
        self.cost.cpu_s = time.process_time() - began
        assert self.core.requests.window is not None and not self._asked
        return self.cost


def recovery(fleet: Fleet, attempts: int) -> Cost:
    """A new coordinator hears all nodes, each with `attempts` found attempts, and makes every one durable."""
    heads = [AttemptHead(f"old{n}", n, 3, n) for n in range(1, attempts + 1)]
    stored = fleet.stored(heads, dict.fromkeys((head.attempt for head in heads), b"the manifest"))
    bench = HandDriven(fleet, manifests=False)
    began = time.process_time()
    bench.meet(stored)
    bench.answer_all()
    bench.cost.cpu_s = time.process_time() - began
    assert all(attempt.phase is Phase.DURABLE and attempt.finished for attempt in bench.core.attempts.values())
    assert len(bench.core.attempts) == attempts
    return bench.cost


def reading(manifest: bytes) -> Cost:
    """A manifest of another incarnation is read: once for each found attempt at a recovery, and at a resume."""
    cost = Cost()
    began = time.process_time()
    Manifest.from_bytes(manifest, where="the manifest")
    cost.cpu_s = time.process_time() - began
    return cost


@dataclass
class Led:
    """What the whole service spent, CPU seconds of the process; its ports and its store cost next to nothing."""

    boot_s: float
    saves_s: list[float]
    steps_s: list[float]
    pulse_s: float  # one heartbeat: a sign of life of every node, and the look at what may be collected
    calls: Counter[str]  # of one save
    step_calls: Counter[str]
    manifest_bytes_sent: int  # in one save, to all nodes together


def led(fleet: Fleet, saves: int, steps: int) -> Led:
    """Boots the real Service on the fleet, then saves and steps with nothing due."""
    logging.getLogger("lastgood.coordinator").setLevel(logging.CRITICAL)
    return asyncio.run(_led(fleet, saves, steps))


def service_of(fleet: Fleet, calls: Counter[str]) -> tuple[Service, list[FleetPort]]:
    """A service, not booted, and the ports that it discovers: a list that may be changed."""
    ports = [FleetPort(fleet, node, calls) for node in fleet.nodes]

    async def discover() -> list[FleetPort]:
        return ports

    async def shut_down() -> None:
        """There is no process to end."""

    async def notices() -> list[Notice]:
        return []

    options = Options(
        run="run",
        store="/nowhere/store",
        staging="/nowhere/staging",
        save_freq=2,
        save_total_limit=None,
        heartbeat_s=1e6,  # measured by hand
        snapshot_deadline_s=3600,
        accept_deadline_s=3600,
    )
    store = FleetStore()
    lane = Lane(store.url, 1, StoreUnavailableError)
    return Service(options, store, lane, Identity("here", "token", "here"), discover, shut_down, notices), ports


async def _led(fleet: Fleet, saves: int, steps: int) -> Led:
    calls: Counter[str] = Counter()
    service, ports = service_of(fleet, calls)
    began = time.process_time()
    await service.boot()
    boot_s = time.process_time() - began
    assert service.driver is not None and not service.nodes.missing().members
    saves_s, steps_s = [], []
    save_calls: Counter[str] = Counter()
    step_calls: Counter[str] = Counter()
    sent = 0
    number = 0
    for measured in range(max(saves, steps) + 1):  # the first warms up
        number += 1
        before, began = calls.copy(), time.process_time()
        told = await service.end_step(number, {}, Progress(), False)
        spent_s = time.process_time() - began
        assert told.saved is None and not told.failures, told
        await service.before_update()
        step_calls = calls - before
        if measured:
            steps_s.append(spent_s)
        if measured > saves:
            number += 1  # a step with nothing due again
            continue
        number += 1
        sent_before = sum(port.manifest_bytes for port in ports)
        before, began = calls.copy(), time.process_time()
        told = await service.end_step(number, {}, Progress(), False)
        assert told.saved is not None and not told.failures, told
        drained = await service.driver.drain(3600)
        assert drained.drained, drained
        spent_s = time.process_time() - began
        save_calls = calls - before
        sent = sum(port.manifest_bytes for port in ports) - sent_before
        if measured:
            saves_s.append(spent_s)
        await service.before_update()
    began = time.process_time()
    await service.nodes.feel_pulses()
    assert service._housekeeping is not None
    await service._housekeeping._collect()
    pulse_s = time.process_time() - began
    for task in list(service._tasks):
        task.cancel()
    await service.end()
    return Led(boot_s, saves_s, steps_s, pulse_s, save_calls, step_calls, sent)
