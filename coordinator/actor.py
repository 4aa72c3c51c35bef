"""The coordinator as a Ray actor: a thin shell around Service. Detached, named, restarted by Ray without state.

It is pinned (softly) to the node it was created on, takes no CPU and no placement group, and holds handles to
lastgood's own stagers only: a handle to a user's actor would keep that actor and its GPU alive.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from ..storage.errors import LastgoodError, StagingError, StoreUnavailableError
from ..storage.ids import ulid
from ..storage.lanes import Lane
from ..storage.manifest import Completed, ShardRecord
from ..storage.store import open_store
from .catalog import Checkpoint
from .housekeeping import STORE_S
from .messages import (
    AttemptHead,
    Grant,
    Inventory,
    Line,
    LoadRequest,
    MemberId,
    NodeSnapshot,
    Progress,
    RankClaim,
    RankReport,
    RecordState,
    RoleDeclaration,
    SaveRequest,
    SaveState,
    SnapshotOrder,
)
from .names import DRIVER_ROLE, NAMESPACE, STEP_CALLS, coordinator_name, stager_name, stager_prefix
from .node_socket import NodeLine, SocketServer
from .options import Options
from .outcomes import DrainOutcome, Missing, SaveOutcome, StepOutcome
from .ownership import Identity
from .ports import WAITED_FOR, Notice
from .ray_names import draining_nodes, named_actors, plain, session_dir
from .restore import Restored, ResumeTermsOrder
from .runner import answer_within
from .service import Service
from .story import Story
from .versions import versions

log = logging.getLogger("lastgood.coordinator")

CALL_S = 60.0  # beyond its own deadline, until a call to a stager counts as unanswered
WAKE_TRIES = 300
WAKE_RETRY_S = 0.2
STORE_THREADS = 2  # for what the service itself asks of the store; the driver has its own
SHARE_BYTES = 100_000  # beyond it Ray itself copies an argument into its object store, once for each call
KEEP_SHARED = 2  # the manifest that is committed, and one that is published again
PULSE_S = 10.0  # for a sign of life
NEAR_TRIES = 3  # in a row, until a stager of the same node is asked over Ray only
UPLOAD_S = 24 * 3600.0  # the driver's upload_s is the deadline; this only bounds the call


class SharedManifests:
    """A long manifest is put into Ray's object store once, and each node fetches it from whoever has it.

    As a plain argument it would be copied there anew for every call: nodes x bytes, twice for each commit.
    """

    def __init__(self) -> None:
        self._newest: list[tuple[bytes, Any]] = []  # with their references

    def share(self, manifest: bytes) -> Any:
        """What to give to a call in place of the bytes; the callee is given the bytes."""
        if len(manifest) < SHARE_BYTES:
            return manifest
        for known, reference in self._newest:
            if known == manifest:
                return reference
        reference = ray.put(manifest)
        self._newest = [(manifest, reference), *self._newest[: KEEP_SHARED - 1]]
        return reference


class RayStagerPort:
    """One stager: implements ports.StagerPort. Errors of lastgood arrive as themselves.

    It is asked over Ray; on the coordinator's own node (`near`) over its socket, for what training waits for. When the
    socket fails, the same call is made over Ray: everything in ports.StagerPort may be repeated.
    """

    def __init__(self, name: str, handle: Any, manifests: SharedManifests, *, near: bool) -> None:
        self.name = name
        self._handle = handle
        self._manifests = manifests
        self._line: NodeLine | None = None
        self._near_tries = NEAR_TRIES if near else 0

    async def _ask(self, method: str, *arguments: Any, limit_s: float = CALL_S) -> Any:
        """`limit_s` bounds the call in any case; most callers bound it more tightly."""
        if method in WAITED_FOR and self._near_tries > 0:
            line = self._line
            try:
                if line is None:
                    line = self._line = NodeLine(Path(await self._ask("door")))
                answer = await answer_within(line.call(method, *arguments), limit_s, self.name, method)
                self._near_tries = NEAR_TRIES
                return answer
            except (OSError, EOFError) as error:
                log.info("%s is asked over Ray: its socket failed at %s (%s)", self.name, method, error)
                if self._line is line:  # else another call has seen it fail
                    self._line = None
                    self._near_tries -= 1
        try:
            return await answer_within(getattr(self._handle, method).remote(*arguments), limit_s, self.name, method)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            raise StagingError(f"{self.name} does not answer {method}: {plain(error)}", away=True) from error

    def kill(self) -> None:
        """Ends the stager's process for good; it has closed down before."""
        ray.kill(self._handle, no_restart=True)

    async def hello(self, epoch: int, declarations: Sequence[RoleDeclaration]) -> Inventory:
        return await self._ask("hello", epoch, list(declarations))

    async def highest_epoch(self) -> int:
        return await self._ask("highest_epoch", limit_s=PULSE_S)

    async def mark(self, epoch: int, step: int, deadline_s: float) -> NodeSnapshot:
        return await self._ask("mark", epoch, step, deadline_s, limit_s=deadline_s + CALL_S)

    async def reopen(self, epoch: int, step: int, deadline_s: float) -> NodeSnapshot:
        return await self._ask("reopen", epoch, step, deadline_s, limit_s=deadline_s + CALL_S)

    async def remember(self, epoch: int, requests: Sequence[SaveRequest]) -> None:
        await self._ask("remember", epoch, requests)

    async def close_window(self, epoch: int, deadline_s: float) -> None:
        await self._ask("close_window", epoch, deadline_s, limit_s=deadline_s + CALL_S)

    async def pause(self, epoch: int, head: AttemptHead, deadline_s: float) -> None:
        await self._ask("pause", epoch, head, deadline_s, limit_s=deadline_s + CALL_S)

    async def release(self, epoch: int, head: AttemptHead) -> None:
        await self._ask("release", epoch, head)

    async def snapshot(self, epoch: int, order: SnapshotOrder) -> NodeSnapshot:
        return await self._ask("snapshot", epoch, order, limit_s=order.deadline_s + CALL_S)

    async def copying(self, epoch: int, head: AttemptHead, deadline_s: float) -> None:
        await self._ask("copying", epoch, head, deadline_s, limit_s=deadline_s + CALL_S)

    async def stage(self, epoch: int, head: AttemptHead, deadline_s: float) -> Sequence[ShardRecord]:
        return await self._ask("stage", epoch, head, deadline_s, limit_s=deadline_s + CALL_S)

    async def accept(self, epoch: int, head: AttemptHead, manifest: bytes) -> RecordState:
        return await self._ask("accept", epoch, head, self._manifests.share(manifest))

    async def refuse(self, epoch: int, head: AttemptHead, reason: str) -> RecordState:
        return await self._ask("refuse", epoch, head, reason)

    async def publish(self, epoch: int, completed: Completed, manifest: bytes) -> None:
        await self._ask("publish", epoch, completed, self._manifests.share(manifest))

    async def upload(self, epoch: int, head: AttemptHead) -> None:
        await self._ask("upload", epoch, head, limit_s=UPLOAD_S)

    async def note_durable(self, epoch: int, head: AttemptHead) -> None:
        await self._ask("note_durable", epoch, head)

    async def discard(self, epoch: int, head: AttemptHead) -> None:
        await self._ask("discard", epoch, head)

    async def load(
        self, epoch: int, head: AttemptHead, request: LoadRequest, deadline_s: float, members: Sequence[MemberId]
    ) -> None:
        await self._ask("load", epoch, head, request, deadline_s, list(members), limit_s=deadline_s + CALL_S)

    async def apply(self, epoch: int, head: AttemptHead, deadline_s: float, members: Sequence[MemberId]) -> None:
        await self._ask("apply", epoch, head, deadline_s, list(members), limit_s=deadline_s + CALL_S)

    async def forget(self, epoch: int) -> None:
        await self._ask("forget", epoch)

    async def collect(self, epoch: int, head: AttemptHead, reason: str) -> None:
        await self._ask("collect", epoch, head, reason)

    async def grant(self, epoch: int, grant: Grant) -> None:
        await self._ask("grant", epoch, grant)

    async def close_down(self) -> None:
        await self._ask("close_down")


class CoordinatorActor:
    """What clients call. Every method first waits until this incarnation has recovered."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = Options.model_validate(options)
        if _was_restarted():  # takeover is for the attach that asked for it: somebody may have taken over since
            self._options = self._options.model_copy(update={"takeover": False})
        self._service: Service | None = None
        self._boot: asyncio.Task[Service] | None = None
        self._ports: dict[str, RayStagerPort] = {}
        self._store_lane: Lane | None = None
        self._door: SocketServer | None = None
        self._manifests = SharedManifests()
        # Recover at once, also when Ray restarted this actor and nobody calls: uploads must go on.
        me = ray.get_runtime_context().current_actor
        threading.Thread(target=_wake, args=(me,), name="lastgood-wake", daemon=True).start()

    async def wake(self) -> None:
        """The first call of every incarnation, by itself. What prevents the start is told to whoever calls next."""
        try:
            await self._ready()
        except LastgoodError as error:
            log.error("the coordinator of %s cannot start: %s", self._options.run, error)

    async def _ready(self) -> Service:
        if self._boot is None or (self._boot.done() and self._boot.exception() is not None):
            self._boot = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._boot)

    async def _start(self) -> Service:
        store = open_store(self._options.store)
        if self._store_lane is None:
            self._store_lane = Lane(f"the store {store.url}", STORE_THREADS, StoreUnavailableError)
        await self._store_lane.run("its probe", functools.partial(store.probe, self._options.run), STORE_S)
        cluster = Path(session_dir()).name
        address = f"{socket.gethostname()} pid {os.getpid()}, Ray {cluster}"
        identity = Identity(cluster, ulid(), address)
        service = Service(
            self._options, store, self._store_lane, identity, self._discover, self._shut_down, self._notices
        )
        self._service = service
        await service.boot()
        await self._open_door()
        return service

    async def _open_door(self) -> None:
        """A socket for drivers of this node, in Ray's directory for this session. Without it they call over Ray."""
        session, prefix = Path(session_dir()), f"lastgood:{self._options.run}:"
        door = SocketServer(session / f"{prefix}{ulid()}", self, STEP_CALLS, "coordinator", LastgoodError)
        try:
            for left in session.glob(f"{prefix}*"):  # by incarnations that were killed
                shutil.rmtree(left, ignore_errors=True)
            door.folder.mkdir(mode=0o700)
            await door.open()
        except (OSError, StagingError) as error:
            log.info("drivers on this node call over Ray: %s", error)
            return
        self._door = door

    async def _discover(self) -> list[RayStagerPort]:
        return await asyncio.to_thread(self._find_stagers)

    def _find_stagers(self) -> list[RayStagerPort]:
        found = named_actors(stager_prefix(self._options.run))
        here = stager_name(self._options.run, ray.get_runtime_context().get_node_id())
        self._ports = {
            name: self._ports.get(name) or RayStagerPort(name, handle, self._manifests, near=name == here)
            for name, handle in found.items()
        }
        return list(self._ports.values())

    async def _notices(self) -> list[Notice]:
        """Nodes of the run that Ray is draining (a spot instance's notice, an autoscaler, `ray drain-node`)."""
        return [
            Notice(node, f"Ray drains node {node}" + ("" if left_s is None else f", {left_s:.0f} s are left"), left_s)
            for node, left_s in (await asyncio.to_thread(draining_nodes)).items()
            if stager_name(self._options.run, node) in self._ports
        ]

    async def _shut_down(self) -> None:
        for port in self._ports.values():
            port.kill()
        if self._door is not None:
            self._door.close()
            shutil.rmtree(self._door.folder, ignore_errors=True)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def waits_for(self) -> str | None:
        """Why it has not answered anything else yet, a sentence; None when nothing holds it up. Answers at once."""
        return None if self._service is None else self._service.waits_for

    async def hello(self) -> dict[str, Any]:
        """Who leads the run: options, versions, epoch, pid, Ray node, the folder of its socket there."""
        service = await self._ready()
        return {
            "options": self._options.model_dump(mode="json"),
            "versions": versions(),
            "epoch": service.epoch,
            "pid": os.getpid(),
            "ray_node": ray.get_runtime_context().get_node_id(),
            "door": None if self._door is None else str(self._door.folder),
            "members": service.nodes.count_members(),
            "drivers": service.nodes.processes_of(DRIVER_ROLE),
            "leading_members": service.member_led.live(),
            "newest": service.newest(),
        }

    async def node_changed(self, node: str) -> None:
        """A stager tells that its registrations changed."""
        service = await self._ready()
        try:
            await service.nodes.node_changed(node)
        except LastgoodError as error:
            log.warning("after a change on %s: %s", node, error)

    async def declare(self, declaration: RoleDeclaration) -> Missing:
        return await (await self._ready()).declare(declaration)

    async def end_step(self, step: int, metrics: Mapping[str, float], progress: Progress, again: bool) -> StepOutcome:
        return await (await self._ready()).end_step(step, metrics, progress, again)

    async def before_update(self) -> None:
        await (await self._ready()).before_update()

    async def save(self, request: SaveRequest) -> SaveOutcome:
        return await (await self._ready()).save(request)

    async def wait(self, request_id: str, state: SaveState, timeout_s: float) -> SaveOutcome:
        return await (await self._ready()).wait(request_id, state, timeout_s)

    async def resume(self, mode: int | str, order: ResumeTermsOrder) -> Restored | None:
        return await (await self._ready()).resume(mode, order)

    async def checkpoints(self) -> list[Checkpoint]:
        service = await self._ready()
        return [replace(checkpoint, manifest=None) for checkpoint in service.checkpoints()]

    async def stories(self, step: int) -> tuple[Story, ...]:
        return (await self._ready()).stories(step)

    async def changed(self, seen: Mapping[str, bool], timeout_s: float) -> list[Checkpoint]:
        found = await (await self._ready()).changed(seen, timeout_s)
        return [replace(checkpoint, manifest=None) for checkpoint in found]

    async def status(self) -> dict[str, Any]:
        return (await self._ready()).status()

    async def finish(self, timeout_s: float, request_id: str, progress: Progress) -> DrainOutcome:
        return await (await self._ready()).finish(timeout_s, request_id, progress)

    async def end(self, memberships: Mapping[str, str]) -> None:
        service = await self._ready()
        service.require_members("close", memberships)
        await service.end()

    # What the ranks of a member-led run call (member_led.py).

    async def join(self, claim: RankClaim, wait_s: float) -> str | None:
        return await (await self._ready()).member_led.gathering.join(claim, wait_s)

    async def joined(self, role: str, membership: str, wait_s: float) -> tuple[str, ...] | None:
        return await (await self._ready()).member_led.gathering.joined(role, membership, wait_s)

    async def resume_together(
        self,
        member: MemberId,
        membership: str,
        after: tuple[int, int] | None,
        mode: int | str,
        terms: ResumeTermsOrder,
    ) -> Line:
        return await (await self._ready()).member_led.resume(member, membership, after, mode, terms)

    async def still_counts(self, member: MemberId, membership: str, crew: tuple[str, ...]) -> None:
        (await self._ready()).member_led.check_counts(member, membership, crew)

    async def report(self, reports: Sequence[RankReport]) -> None:
        (await self._ready()).member_led.report(reports)

    async def close_together(
        self, member: MemberId, membership: str, last_step: int, save_last: bool, timeout_s: float
    ) -> tuple[DrainOutcome, bool]:
        return await (await self._ready()).member_led.close(member, membership, last_step, save_last, timeout_s)

    async def end_together(self) -> None:
        await (await self._ready()).member_led.end()


def _was_restarted() -> bool:
    """Whether Ray has restarted this actor. Ray's own property warns of a name that it uses itself (2.60)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _wake(me: Any) -> None:
    """Calls this actor's own wake until it arrives: while Ray still counts it as restarting, calls fail at once."""
    for _ in range(WAKE_TRIES):
        try:
            ray.get(me.wake.remote(), timeout=CALL_S)
            return
        except ray.exceptions.RayError as error:
            log.debug("the coordinator's own call did not arrive yet: %s", error)
            time.sleep(WAKE_RETRY_S)


def create_coordinator(options: Options) -> Any:
    """The run's coordinator, created on this node unless it lives already. Returns its handle.

    Ray restarts it here too, and elsewhere when this node is gone. (A soft NodeAffinitySchedulingStrategy puts an actor
    that takes no CPU on any node: ray 2.60.)
    """
    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(CoordinatorActor)
        .options(
            name=coordinator_name(options.run),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=1000,
            scheduling_strategy="DEFAULT",  # of no placement group that it is created in: it would end with that
            label_selector={"ray.io/node-id": here},
            fallback_strategy=[{"label_selector": {}}],
        )
        .remote(options.model_dump(mode="json"))
    )
