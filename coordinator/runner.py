"""Runs one command of the protocol core against the world and answers with the event that came of it.

The rule: every call has a timeout, every outcome becomes exactly one event, and no exception leaves `run` (but
cancellation). A failpoint `coordinator.<command>` is passed just before each command, and
`coordinator.<command>.<node>` before one to a node; `coordinator.staged` when all staging votes are in and before
anything is accepted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from ..storage.errors import DeadlineError, StoreError, StoreUnavailableError
from ..storage.failpoints import VARIABLE, failpoint
from ..storage.manifest import Completed, Manifest, MemberRecord, Parent, RoleRecord
from . import commands as cmd
from . import events as ev
from .answers import failure, success
from .ports import ParticipantPort
from .remote import Remote
from .settings import Settings

log = logging.getLogger("lastgood.coordinator")

T = TypeVar("T")
Blocking = Callable[[Callable[[], T]], Awaitable[T]]

LOOK_S = 2.0  # for a look into the store that a commit can do without
_GRACE_S = 1.0  # a node's own error, which names the member, shall arrive before our timeout
_KEEP_BUILT = 2  # manifests are long; one is committed while the one before it is uploaded
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


def point(command: cmd.Command) -> str:
    """The name of the failpoint before a command: `coordinator.note_durable`."""
    return f"coordinator.{_WORD.sub('_', type(command).__name__).lower()}"


async def _pass_points(command: cmd.Command) -> None:
    """Off the loop, so that a pause stops this command and nothing else."""
    if isinstance(command, cmd.BuildManifest):
        await asyncio.to_thread(failpoint, "coordinator.staged")
    await asyncio.to_thread(failpoint, point(command))
    if isinstance(command, cmd.NodeCommand):
        await asyncio.to_thread(failpoint, f"{point(command)}.{command.node}")


def build_manifest(draft: cmd.Draft, created_at: str, versions: Mapping[str, str]) -> bytes:
    """The manifest's bytes. Raises ValueError when the votes do not make one (the model checks them once more)."""
    return manifest_of(draft, created_at, versions).to_bytes()


def manifest_of(draft: cmd.Draft, created_at: str, versions: Mapping[str, str]) -> Manifest:
    """The same, not yet written."""
    parent = draft.parent
    return Manifest(
        run=draft.run,
        attempt=draft.head.attempt,
        step=draft.head.step,
        epoch=draft.head.epoch,
        sequence=draft.head.sequence,
        kind=draft.kind.value,
        tag=draft.tag,
        reason=draft.reason,
        requested_by=draft.requested_by,
        created_at=created_at,
        parent=None
        if parent is None
        else Parent(attempt=parent.attempt, step=parent.step, epoch=parent.epoch, sequence=parent.sequence),
        roles={
            role.role: RoleRecord(world_size=role.world_size, components=tuple(role.components)) for role in draft.roles
        },
        members=tuple(
            MemberRecord(role=word.member.role, rank=word.member.rank, node=word.node, updates=word.updates)
            for word in draft.members
        ),
        participants=draft.participants,
        shards=draft.shards,
        metrics={name: float(value) for name, value in draft.metrics.items()},
        fingerprint=dict(draft.fingerprint),
        versions=dict(versions),
        requests=draft.request_ids,
    )


async def answer_within(call: Awaitable[T], limit_s: float, who: str, what: str) -> T:
    """The call's answer. Raises DeadlineError naming `who` and `what` when there is none: its outcome is unknown then.

    A TimeoutError that the call itself raises (a disk's, a network's) stays what it is.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if task.done():
            return task.result()
    finally:
        task.cancel()
    raise DeadlineError(
        f"{who} has not answered {what} within {limit_s:.1f} s. Is its process stopped, or its host overloaded?",
        waited_s=limit_s,
    )


class Runner:
    """Runs commands. `ports` is read at every call: the driver adds and replaces nodes in it."""

    def __init__(
        self,
        settings: Settings,
        ports: Mapping[str, ParticipantPort],
        remote: Remote | None,
        now_utc: Callable[[], str],
        versions: Mapping[str, str],
        blocking: Blocking[Any],
        building: Blocking[Any] | None = None,
    ) -> None:
        """`blocking` runs calls to the store, `building` (default: the same) what must not wait for those."""
        self._settings = settings
        self._ports = ports
        self._remote = remote
        self._now_utc = now_utc
        self._versions = versions
        self._blocking = blocking
        self._building = building if building is not None else blocking
        self._completed: dict[str, Completed] = {}  # attempt -> its marker: the same bytes at every participant
        self._built: dict[str, tuple[bytes, Manifest]] = {}  # the newest that were built here, by attempt

    async def run(self, command: cmd.AttemptCommand) -> ev.Event:
        """Runs the command to its end and answers with its event."""
        try:
            if os.environ.get(VARIABLE):
                await _pass_points(command)
            if isinstance(command, cmd.NodeCommand):
                call, timeout_s = self._call(command)
            else:
                call, timeout_s = self._effect(command)
            who = f"the stager of {command.node}" if isinstance(command, cmd.NodeCommand) else "the store"
            return success(command, await answer_within(call, timeout_s, who, point(command).partition(".")[2]))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this command's outcome
            return failure(command, error)

    def _call(self, command: cmd.NodeCommand) -> tuple[Awaitable[Any], float]:
        port = self._ports.get(command.node)
        if port is None:
            raise ConnectionError(f"no stager of {command.node} is known here")
        epoch, head = self._settings.epoch, command.head
        deadlines = self._settings.deadlines
        if isinstance(command, cmd.Pause):
            return port.pause(epoch, head, command.deadline_s), command.deadline_s + _GRACE_S
        if isinstance(command, cmd.Snapshot):
            return port.snapshot(epoch, command.order), command.order.deadline_s + _GRACE_S
        if isinstance(command, cmd.Release):
            return port.release(epoch, head), deadlines.call_s
        if isinstance(command, cmd.Stage):
            return port.stage(epoch, head, command.deadline_s), command.deadline_s + _GRACE_S
        if isinstance(command, cmd.Accept):
            timeout_s = min(deadlines.call_s, command.deadline_s + _GRACE_S)
            return port.accept(epoch, head, command.manifest), timeout_s
        if isinstance(command, cmd.Refuse):
            return port.refuse(epoch, head, command.reason), deadlines.call_s
        if isinstance(command, cmd.Publish):
            completed = self.completed_of(command.manifest, head.attempt)
            return port.publish(epoch, completed, command.manifest), deadlines.call_s
        if isinstance(command, cmd.Upload):
            return port.upload(epoch, head), deadlines.upload_s
        if isinstance(command, cmd.NoteDurable):
            return port.note_durable(epoch, head), deadlines.call_s
        assert isinstance(command, cmd.Discard), command
        return port.discard(epoch, head), deadlines.call_s

    def _effect(self, command: cmd.AttemptCommand) -> tuple[Awaitable[Any], float]:
        deadlines = self._settings.deadlines
        if isinstance(command, cmd.BuildManifest):
            return self._lead_and_build(command.draft, self._now_utc()), deadlines.accept_s
        remote = self._remote
        if remote is None:
            raise StoreUnavailableError("this run has no store")
        if isinstance(command, cmd.WriteLedger):
            completed = self.completed_of(command.manifest, command.head.attempt)
            return self._blocking(lambda: remote.write_ledger(completed)), deadlines.ledger_s
        assert isinstance(command, cmd.CompleteRemotely), command
        completed, manifest = self.completed_of(command.manifest, command.head.attempt), command.manifest

        def complete() -> None:
            remote.complete(completed, manifest, self.content(manifest, command.head.attempt))
            self._built.pop(command.head.attempt, None)

        return self._blocking(complete), deadlines.remote_s

    async def _lead_and_build(self, draft: cmd.Draft, created_at: str) -> bytes:
        """The last look before a commit begins: raises FencedError when a newer coordinator leads the run.

        Without the store nobody knows; commits on the nodes go on then.
        """
        remote = self._remote
        if remote is not None:
            try:
                await answer_within(self._blocking(remote.require_lead), LOOK_S, "the store", "who leads the run")
            except (StoreError, DeadlineError) as error:
                log.warning("whether another coordinator leads the run is not known now: %s", error)
        return await self._building(lambda: self.build(draft, created_at))

    def build(self, draft: cmd.Draft, created_at: str) -> bytes:
        """The manifest's bytes. What they say is kept: to read them again would cost far more than to write them."""
        manifest = manifest_of(draft, created_at, self._versions)
        data = manifest.to_bytes()
        self._built[draft.head.attempt] = (data, manifest)
        while len(self._built) > _KEEP_BUILT:
            del self._built[next(iter(self._built))]
        return data

    def content(self, data: bytes, attempt: str) -> Manifest:
        """What a manifest says. Raises IntegrityError when it is broken."""
        built = self._built.get(attempt)
        if built is not None and built[0] == data:
            return built[1]
        return Manifest.from_bytes(data, where=f"the manifest of {attempt}")

    def completed_of(self, manifest: bytes, attempt: str) -> Completed:
        """The attempt's COMPLETED; made at its first use, which is just after the commit."""
        if attempt not in self._completed:
            if len(self._completed) > 100:
                del self._completed[next(iter(self._completed))]
            content = self.content(manifest, attempt)
            self._completed[attempt] = Completed.of(content, manifest, self._now_utc())
        return self._completed[attempt]
