"""The agent: the thread that lastgood runs inside each member process.

It polls its node's stager, carries out one order at a time and answers. Control never passes through the user's actor
calls, so a member answers while its actor is busy for minutes. No Ray in here (workers/ray_link.py speaks it), no
collective, no allocation on a device.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ..coordinator.messages import AttemptHead, LoadRequest, MemberId, MemberInfo, MemberReport
from ..storage.errors import FencedError, IntegrityError, LastgoodError, SnapshotError
from ..storage.failpoints import failpoint
from ..storage.ids import ulid
from ..storage.manifest import Manifest, ShardRecord
from ..storage.tree import Flat, flatten
from .component import Tree
from .images import HEADER_BYTES
from .load import PreparedMember, apply_all, prepare
from .member import Member
from .orders import Answer, ImageRequest, Order, OrderKind
from .own_images import Key, OwnImages
from .processes import pid_namespace_of_this_process
from .shard_reader import ShardCopy
from .stillness import Stillness

log = logging.getLogger("lastgood.agent")

POLL_S = 20.0  # how long one poll waits at the stager
RETRY_S = 0.2  # between two tries to reach a stager that is gone


@contextlib.contextmanager
def _blaming(member: MemberId, component: str) -> Iterator[None]:
    """An error about a component's content says whose it is."""
    try:
        yield
    except LastgoodError as error:
        facts = {**error.facts, "member": member, "component": component}
        raise type(error)(f"{member}.{component}: {error.message}", **facts) from error


class StagerGoneError(Exception):
    """The stager does not answer; the agent looks for it again and registers anew."""


class StagerLink(Protocol):
    """What an agent needs from its node's stager. This is the whole surface; every call may raise StagerGoneError."""

    def register(self, process: str, pid: int, pid_namespace: str, members: Sequence[MemberInfo]) -> str: ...

    def unregister(self, process: str) -> None: ...

    def poll(self, process: str, answer: Answer | None, wait_s: float) -> Order | None: ...

    def provide(self, process: str, requests: Sequence[ImageRequest]) -> Mapping[tuple[MemberId, str], str]: ...

    def copying(self, process: str, attempt: str) -> None: ...

    def locate(
        self, head: AttemptHead, record: ShardRecord, rejected: Sequence[str], source: str | None
    ) -> tuple[str, str] | None: ...


class Agent:
    """One per process and run. `add` may be called from any thread; orders are carried out on the agent's own."""

    def __init__(self, run: str, link: StagerLink) -> None:
        self.run = run
        self.process = ulid()
        self._link = link
        self._members: dict[MemberId, Member] = {}
        self._infos: dict[MemberId, MemberInfo] = {}
        self._images = OwnImages(lambda requests: link.provide(self.process, requests))
        self._unprepared = True  # no image was made ahead since this process registered
        self._loaded: tuple[AttemptHead, list[PreparedMember]] | None = None
        self._resumed = False  # state was applied, and the resume is not over
        self._highest_epoch = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, member: Member, membership: str) -> MemberInfo:
        """Takes a member in (replacing one of the same role and rank), registers it and starts the thread.

        Raises SnapshotError when this process does not see the stager's shared memory.
        """
        info = MemberInfo(
            member=member.id,
            world_size=member.world_size,
            components=member.component_names,
            membership=membership,
            process=self.process,
            pid=os.getpid(),
            fingerprint=member.fingerprint(),
            pausable=member.pausable,
            weights=member.weights,
        )
        with self._lock:
            old = self._members.get(member.id)
            if old is not None:
                old.close()
                member.restored(old.updates)
            self._members[member.id] = member
            self._infos[member.id] = info
        self.join()
        return info

    def join(self) -> None:
        """Registers this process with the stager, whatever members it has, and starts the thread.

        Raises SnapshotError when this process does not see the stager's shared memory.
        """
        self._register()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._loop, name=f"lastgood-agent-{self.run}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Leaves the run: hooks are removed, images unmapped. Idempotent; called when the driver ends."""
        if self._ended.is_set():
            return
        self._ended.set()
        try:
            self._link.unregister(self.process)
        except StagerGoneError:
            log.info("the stager was gone before this process could say good-bye")
        with self._lock:
            for member in self._members.values():
                member.close()
            self._members.clear()
            self._infos.clear()
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(timeout=RETRY_S * 5)

    def _register(self) -> None:
        with self._lock:
            infos = tuple(replace(info, granted=self._members[name].pace.grant) for name, info in self._infos.items())
        folder = self._link.register(self.process, os.getpid(), pid_namespace_of_this_process(), infos)
        self._unprepared = True
        if not Path(folder).is_dir():
            raise SnapshotError(
                f"this process (pid {os.getpid()}) does not see the stager's shared memory {folder}. "
                "Run training and lastgood's stager in the same container, or mount one tmpfs into both (image_root).",
                path=folder,
            )

    def _loop(self) -> None:
        answer: Answer | None = None
        last = Answer("")
        while not self._ended.is_set():
            try:
                order = self._link.poll(self.process, answer, POLL_S)
                answer = None
                if order is None:
                    if not self._ended.is_set():  # unknown there because it was restarted, not because we left
                        self._register()
                    continue
            except StagerGoneError:
                self._ended.wait(RETRY_S)
                continue
            except Exception:  # the thread must outlive whatever the stager answers
                log.exception("the stager of this node cannot be used by this process; trying again")
                self._ended.wait(RETRY_S)
                continue
            if order.kind is OrderKind.NOTHING:
                continue
            if order.order_id != last.order_id:  # a repeated order gets the same answer, and is not done twice
                last = self._carry_out(order)
            answer = last
        self._images.close()

    def _carry_out(self, order: Order) -> Answer:
        try:
            if order.epoch < self._highest_epoch:
                raise FencedError(
                    f"order {order.kind.value} is of epoch {order.epoch}; this process has heard epoch "
                    f"{self._highest_epoch}",
                    epoch=order.epoch,
                    highest_epoch=self._highest_epoch,
                )
            self._highest_epoch = order.epoch
            failpoint(f"member.{order.kind.value}")
            return self._do(order)
        except LastgoodError as error:
            return Answer(order.order_id, error=error)
        except Exception as error:
            who = ", ".join(str(member) for member in order.members)
            log.exception("%s raised during %s", who, order.kind.value)
            where = traceback.extract_tb(error.__traceback__)[-1]
            return Answer(
                order.order_id,
                error=SnapshotError(
                    f"{who} (pid {os.getpid()}) raised {type(error).__name__} during {order.kind.value}: {error} (in "
                    f"{where.name}, {where.filename}:{where.lineno}). The previous checkpoint stands.",
                    member=min(order.members, default=None),
                ),
            )

    def _do(self, order: Order) -> Answer:
        with self._lock:
            members = {name: self._members[name] for name in order.members if name in self._members}
        if len(members) != len(order.members):
            gone = sorted(set(order.members) - members.keys())
            raise SnapshotError(f"{gone[0]} is no longer a member in process {os.getpid()}", member=gone[0])
        if order.kind is OrderKind.MARK:
            reports = tuple(member.mark(order.step) for member in members.values())
            if self._unprepared:
                self._prepare_images(members)
            return Answer(order.order_id, reports)
        if order.kind is OrderKind.REOPEN:
            for member in members.values():
                member.gate.require(order.step)
            return Answer(order.order_id, tuple(member.report(order.step) for member in members.values()))
        if order.kind is OrderKind.SNAPSHOT:
            assert order.head is not None
            return self._snapshot(order, order.head, members)
        if order.kind is OrderKind.LOAD:
            assert order.head is not None
            assert order.load is not None
            self._loaded = (order.head, self._load(order.head, order.load, members))
        elif order.kind is OrderKind.APPLY:
            assert order.head is not None
            self._apply(order.head)
            self._resumed = True
        elif order.kind is OrderKind.FORGET:
            self._loaded = None
            if self._resumed and self._unprepared:
                self._prepare_images(members)
            self._resumed = False
        elif order.kind is OrderKind.GRANT:
            assert order.grant is not None
            for member in members.values():
                member.pace.take(order.grant, order.epoch)
        else:
            for member in members.values():
                if order.kind is OrderKind.CLOSE_WINDOW:
                    member.close_window(order.deadline_s)
                elif order.kind is OrderKind.PAUSE:
                    member.pause()
                elif order.kind is OrderKind.RELEASE:
                    member.release()
        return Answer(order.order_id)

    def _snapshot(self, order: Order, head: AttemptHead, members: Mapping[MemberId, Member]) -> Answer:
        """Copies every member's components into images; an update that wants to begin waits until it is done."""
        reports: list[MemberReport] = []
        began = time.monotonic()
        with contextlib.ExitStack() as copies:
            for member in members.values():
                copies.enter_context(member.gate.copying(order.step))
            trees = {name: member.capture(order.step) for name, member in members.items()}
            before = Stillness({str(name): found for name, found in trees.items()})
            if order.overlapped:  # not earlier: what is written from here on is noticed
                self._link.copying(self.process, head.attempt)
            flats = self._laid_out(trees)
            sealed = self._images.fill(head.attempt, flats)
            _require_still(before, order)
            for name, member in members.items():
                nbytes = sum(self._images.nbytes(key) for key in flats if key[0] == name)
                reports.append(member.report(order.step, nbytes))
        log.debug("attempt %s copied in %.3f s", head.attempt, time.monotonic() - began)
        return Answer(order.order_id, tuple(reports), sealed)

    def _laid_out(self, trees: Mapping[MemberId, Mapping[str, Tree]]) -> dict[Key, Flat]:
        flats: dict[Key, Flat] = {}
        for name, found in trees.items():
            for component, tree in found.items():
                with _blaming(name, component):
                    flats[name, component] = flat = flatten(tree)
                    self._images.lay_out((name, component), flat)
        return flats

    def _prepare_images(self, members: Mapping[MemberId, Member]) -> None:
        """Nothing moves now, and all state is there: its images are made while training goes on."""
        self._unprepared = False
        try:
            trees = {name: member.survey() for name, member in members.items()}
            self._images.make_ahead(list(self._laid_out(trees)))
        except LastgoodError as error:
            log.warning("the next save is going to fail: %s", error)

    def _load(
        self, head: AttemptHead, request: LoadRequest, members: Mapping[MemberId, Member]
    ) -> list[PreparedMember]:
        manifest = Manifest.from_bytes(request.manifest, where=f"the manifest of attempt {head.attempt}")
        return [self._prepared(member, manifest, head, request) for member in members.values()]

    def _prepared(self, member: Member, manifest: Manifest, head: AttemptHead, request: LoadRequest) -> PreparedMember:
        """One member's state, from the nearest copies that are whole; a broken copy is passed over for the next."""
        rejected: dict[str, list[str]] = {}  # shard path -> copies of it that are broken
        findings: list[str] = []
        given: dict[str, str] = {}  # copy -> shard path

        def locate(record: ShardRecord) -> ShardCopy:
            found = self._link.locate(head, record, rejected.get(record.path, []), request.source)
            if found is None:
                tried = "; ".join(findings) or "it is on no disk that can be reached and not in the store"
                raise IntegrityError(
                    f"shard {record.path} of step {head.step} (attempt {head.attempt}) is not whole anywhere: {tried}",
                    path=record.path,
                    attempt=head.attempt,
                )
            path, tier = found
            given[path] = record.path
            return ShardCopy(Path(path), HEADER_BYTES if tier == "memory" else 0, direct=tier == "local")

        while True:
            try:
                return prepare(member, manifest, locate, request.on_reshard, request.allow_changes)
            except IntegrityError as error:
                copy = str(error.facts.get("path"))
                if copy not in given or copy in rejected.get(given[copy], []):
                    raise
                log.warning("rejected one copy of a shard, trying the next: %s", error)
                rejected.setdefault(given[copy], []).append(copy)
                findings.append(str(error))

    def _apply(self, head: AttemptHead) -> None:
        if self._loaded is None or self._loaded[0].attempt != head.attempt:
            raise SnapshotError(f"nothing is loaded of attempt {head.attempt} in process {os.getpid()}; load it first")
        apply_all(self._loaded[1])
        self._loaded = None


def _require_still(before: Stillness, order: Order) -> None:
    disturbed = before.disturbed()
    if disturbed is not None:
        mend = "Call before_update() before weights are written, moved or freed by other means"
        if order.overlapped:
            mend += ", or use snapshot='blocking'"
        raise SnapshotError(
            f"{disturbed} was written to while it was copied, by something that is no optimizer step (pid "
            f"{os.getpid()}); the copy of step {order.step} may be torn and is not used. The previous checkpoint "
            f"stands. {mend}.",
        )
