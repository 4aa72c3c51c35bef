"""A run as its users hold it: members, resume, end_step, save, close. The rule: every wait has a deadline.

Nothing here touches a tensor, and nothing is decided here: the coordinator is asked (client/link.py).
"""

from __future__ import annotations

import getpass
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import ray.exceptions

from ..coordinator.catalog import Checkpoint
from ..coordinator.messages import MemberInfo, Progress, RoleDeclaration, SaveKind, SaveRequest, SaveState
from ..coordinator.names import DRIVER_ROLE
from ..coordinator.options import Options
from ..coordinator.outcomes import SaveOutcome, StepOutcome, reached
from ..coordinator.restore import Restored
from ..coordinator.story import Story
from ..storage.errors import (
    DeadlineError,
    LastgoodError,
    MembershipError,
    OptionsError,
    SaveFailedError,
    StoreError,
    UsageError,
)
from ..storage.ids import ulid
from ..storage.layout import check_name
from ..workers.install import InstallOrder, RankFunction, StateFunction, agent_of, install, leave, leave_actor, where
from ..workers.member import Member
from ..workers.stager_actor import create_stager
from . import sigterm
from .leading import check_drained, end_limit_s, heed, metrics_of, resume_mode, resume_terms
from .link import CALL_S, RETRY_S, CoordinatorLink

log = logging.getLogger("lastgood")

POLL_S = 15.0  # one long poll of SaveHandle.wait
GRACE_S = 2.0  # for the answer of a poll whose time is up


class SaveHandle:
    """One save that was asked for. `wait` as often as you like."""

    def __init__(self, link: CoordinatorLink, request: SaveRequest, outcome: SaveOutcome) -> None:
        self._link = link
        self._request = request
        self._asked_s = time.monotonic()
        self.outcome = outcome  # as last heard

    def __repr__(self) -> str:
        return f"SaveHandle({self.outcome.state.value}, step={self.outcome.step}, attempt={self.outcome.attempt})"

    def wait(self, state: str | SaveState = SaveState.COMMITTED, timeout_s: float = 900.0) -> SaveOutcome:
        """Waits until the save is `state` ("snapshot", "staged", "committed", "uploading", "durable").

        Answers how it stands, which may be further. Raises SaveFailedError when it has failed (the previous checkpoint
        stands) or its outcome is in doubt (the error's `in_doubt` fact), DeadlineError after `timeout_s`.
        """
        wanted = SaveState(state)
        until = time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            try:
                self.outcome = self._link.call(
                    "wait", self._request.request_id, wanted, max(0.0, min(left, POLL_S)), timeout_s=_bound(left)
                )
            except UsageError:  # a restarted coordinator has not heard of it: served once, by its id
                self.outcome = self._link.call("save", self._again(), timeout_s=_bound(until - time.monotonic()))
            if self.outcome.failed:
                raise self._failed()
            if reached(self.outcome.state, wanted):
                return self.outcome
            if left <= 0:
                waits = f" It waits: {self.outcome.waits_for}." if self.outcome.waits_for else ""
                raise DeadlineError(
                    f"save of run {self._link.run} is {self.outcome.state.value}, not {wanted.value}, after "
                    f"{timeout_s:.0f} s.{waits} It goes on; wait again, or look at `lastgood status {self._link.run}`.",
                    waited_s=timeout_s,
                )

    def _failed(self) -> SaveFailedError:
        outcome, what = self.outcome, f"save of run {self._link.run} ({self._request.reason})"
        if outcome.in_doubt:
            told = (
                f"{what} is in doubt: {outcome.blame}. It may still turn out committed, as step {outcome.step}; until "
                f"then the previous checkpoint stands. Look at `lastgood story {self._link.run} {outcome.step}`."
            )
        else:
            told = f"{what} failed: {outcome.blame}. The previous checkpoint stands."
        return SaveFailedError(
            told, step=outcome.step, attempt=outcome.attempt, blame=outcome.blame, in_doubt=outcome.in_doubt
        )

    def _again(self) -> SaveRequest:
        """The request with what is left of its deadline."""
        given_s = self._request.deadline_s
        if given_s is None:
            return self._request
        left_s = max(0.001, given_s - (time.monotonic() - self._asked_s))
        return replace(self._request, deadline_s=left_s, asked_at=time.time())


def _bound(left_s: float) -> float:
    """Until a call that is part of a longer wait is given up: the wait must end when its own time is up."""
    return min(CALL_S, max(0.0, left_s) + GRACE_S)


class Run:
    """A training run under lastgood's care. Made by `attach` (the driver) or `connect` (any other job)."""

    def __init__(self, options: Options, link: CoordinatorLink, *, leads: bool) -> None:
        self.options = options
        self.name = options.run
        self._link = link
        self._leads = leads
        self._driver = ulid()
        self._handles: dict[str, list[Any]] = {}  # the user's actors by role, held only while this driver lives
        self._next_step = 1
        self._progress = Progress()
        self._closed = False

    # -- members

    def add_members(
        self,
        role: str,
        handles: Sequence[Any],
        *,
        state: StateFunction,
        rank: RankFunction | None = None,
    ) -> tuple[MemberInfo, ...]:
        """Makes running Ray actors of any class members of `role`. A later call for the role replaces the earlier one.

        `state(worker)` runs once in each actor's process and returns the objects that hold its state by component name,
        such as {"model": worker.model, "optimizer": worker.optimizer, "rng": lastgood.RNG()}. The rank is asked of the
        process: torch.distributed, then `rank(worker) -> (rank, world_size)`'s word if given, see workers/install.py.

        Raises MembershipError (ranks missing or doubled, the caller's own actor, an actor that does not answer within
        register_deadline_s), UsageError for a component that cannot be kept, StagingError for a node's directory.
        """
        self._must_lead("add_members")
        check_name("role", role)
        _check_call(role, handles, state, rank)
        self._refuse_own_actor(handles)
        deadline_s = self.options.register_deadline_s
        places = self._ask_all(role, [handle.__ray_call__.remote(where) for handle in handles], deadline_s)
        for ray_node in sorted({node for node, _ in places}):
            start_stager(self.options, ray_node)
        membership = ulid()
        order = InstallOrder(
            self.name, role, membership, state, rank, len(handles) == 1, self.options.snapshot_deadline_s
        )
        infos = self._ask_all(role, [handle.__ray_call__.remote(install, order) for handle in handles], deadline_s)
        self._declare(role, membership, infos)
        self._handles[role] = list(handles)
        return tuple(sorted(infos, key=lambda info: info.member))

    def add_driver(self, state: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> MemberInfo:
        """Makes this process a member, role "trainer": its dataloader, RNG, cursor, whatever a resume needs.

        Raises UsageError for a component that cannot be kept.
        """
        self._must_lead("add_driver")
        objects = state() if callable(state) else state
        if not isinstance(objects, Mapping):
            raise UsageError(
                f"add_driver was given a {type(objects).__name__}; it takes a dict from component names to the objects "
                "that hold the state, such as {'dataloader': loader, 'rng': lastgood.RNG()}, or a function that "
                "returns one. Nothing was touched.",
            )
        member = Member.of(DRIVER_ROLE, 0, 1, objects, hold_limit_s=self.options.snapshot_deadline_s)
        membership = ulid()
        info = agent_of(self.name).add(member, membership)
        self._declare(DRIVER_ROLE, membership, [info])
        return info

    def _declare(self, role: str, membership: str, infos: Sequence[MemberInfo]) -> None:
        worlds = sorted({info.world_size for info in infos})
        ranks = sorted(info.member.rank for info in infos)
        if len(worlds) != 1 or ranks != list(range(worlds[0])):
            raise MembershipError(
                f"add_members({role!r}): {len(infos)} actors say that they are ranks {ranks} of {worlds}; they must be "
                f"ranks 0..{worlds[-1] - 1}, each once. Nothing is saved for this role. Pass the handles of the whole "
                "group, each once, or rank=lambda worker: (rank, world_size).",
                role=role,
                ranks=ranks,
                world_sizes=worlds,
            )
        components = {info.components for info in infos}
        if len(components) != 1:
            raise MembershipError(
                f"add_members({role!r}): members name different components: {sorted(components)}. Every member of a "
                "role has the same ones. Nothing is saved for this role.",
                role=role,
            )
        declaration = RoleDeclaration(role, worlds[0], components.pop(), membership, self._driver)
        until = time.monotonic() + self.options.register_deadline_s
        while True:
            missing = self._link.call("declare", declaration, timeout_s=CALL_S)
            absent = [name for name in missing.members if name.startswith(f"{role}:")]
            if not absent:
                roles = (*(known for known in self._progress.roles if known.role != role), declaration)
                self._progress = replace(self._progress, roles=roles)
                return
            if time.monotonic() > until:
                why = " ".join(missing.why) or "Is the node's stager alive (lastgood status)?"
                raise MembershipError(
                    f"add_members({role!r}): the coordinator does not see {', '.join(absent)}. Nothing is saved for "
                    f"this role. {why}",
                    role=role,
                    missing=absent,
                )
            time.sleep(RETRY_S)

    def _ask_all(self, role: str, references: Sequence[Any], deadline_s: float) -> list[Any]:
        _, late = ray.wait(list(references), num_returns=len(references), timeout=deadline_s)
        if late:
            numbers = [index for index, reference in enumerate(references) if reference in set(late)]
            raise MembershipError(
                f"add_members({role!r}): actors {numbers} of the list have not answered within {deadline_s:.0f} s "
                "(register_deadline_s). Nothing is saved for this role. An actor that is busy in a method answers "
                "after it: add members before training starts.",
                role=role,
                late=numbers,
            )
        try:
            return ray.get(list(references))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LastgoodError):
                raise error.cause from None
            raise UsageError(
                f"add_members({role!r}): the state or rank function raised in the actor: {error.cause!r}. Nothing is "
                f"saved for this role.\n{error}",
                role=role,
            ) from error
        except ray.exceptions.RayError as error:
            raise MembershipError(
                f"add_members({role!r}): an actor died before it answered: {error}. Nothing is saved for this role.",
                role=role,
            ) from error

    def _refuse_own_actor(self, handles: Sequence[Any]) -> None:
        own = ray.get_runtime_context().get_actor_id()
        for index, handle in enumerate(handles):
            actor_id = getattr(handle, "_actor_id", None)
            if actor_id is None:
                raise MembershipError(
                    f"add_members takes Ray actor handles; item {index} is a {type(handle).__name__}. Nothing was "
                    "touched."
                )
            if own is not None and actor_id.hex() == own:
                raise MembershipError(
                    f"item {index} of add_members is the actor that this code runs in: it cannot answer while it "
                    "waits. Nothing was touched. Use run.add_driver(state) for this process."
                )

    # -- training

    @property
    def next_step(self) -> int:
        """The first step to run: 1 from scratch, N + 1 after resuming step N."""
        return self._next_step

    def resume(
        self,
        mode: int | str | None = None,
        *,
        allow_changes: Sequence[str] = (),
        on_reshard: Mapping[str, str] | None = None,
    ) -> Restored | None:
        """Restores every member from a checkpoint. Call it once all members are there, before the first step.

        `mode`: "auto" (the newest whole checkpoint; None if there never was a commit), "latest" (the same, but an error
        if there is none), "none" (from scratch), a step number, or the path of a checkpoint; default: option `resume`.
        Returns what the run continues from; `next_step` follows it. From scratch nothing is put back: a process that
        has trained before resets its own state before this call, since the window of step 0 opens with it.

        Raises ResumeError, FingerprintError, WrongRunError, NotACheckpointError, MembershipError; live state is
        untouched then, except where ResumeError says otherwise.
        """
        self._must_lead("resume")
        roles, memberships = self._progress.roles, self._progress.memberships
        terms = replace(resume_terms(self.options, allow_changes, on_reshard), memberships=memberships)
        chosen = resume_mode(self.options.resume if mode is None else mode)
        restored = self._link.call("resume", chosen, terms, timeout_s=self.options.resume_deadline_s + CALL_S)
        self._next_step = 1 if restored is None else restored.step + 1
        newest = tuple(self._link.call("hello", timeout_s=CALL_S)["newest"])
        head = None if restored is None else restored.head
        self._progress = Progress(resumed=head, resumed_after=newest, newest=newest, roles=roles)
        return restored

    def end_step(self, step: int, metrics: Mapping[str, float] | None = None) -> StepOutcome:
        """Step `step` has ended: its update is done on every member. Saves when due; returns once training may go on.

        Call it between the end of one update and the start of the next. Metrics (finite or not) go into the manifest.
        Raises SaveFailedError when saves failed and on_failure says stop; otherwise a failure is in the outcome and
        the log, and the previous checkpoint stands.
        """
        self._must_lead("end_step")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"end_step({step!r}): a step is a whole number from 0. Nothing was touched.")
        last = self._progress.last_step
        if last is not None and step < last:
            raise UsageError(
                f"end_step({step}), but step {last} has ended already. Nothing was touched. Steps go up; to go back, "
                f"resume({step - 1}) first.",
                step=step,
            )
        if step > self._next_step:
            log.warning("end_step(%d) follows step %d: are steps left out?", step, self._next_step - 1)
        values = metrics_of(metrics)
        options = self.options
        limit_s = options.save_deadline_s + options.snapshot_deadline_s + options.return_deadline_s + CALL_S
        try:
            outcome: StepOutcome = self._link.call(
                "end_step", step, values, self._progress, timeout_s=limit_s, again=True
            )
        except StoreError as error:  # the coordinator was restarted and cannot start while the store is away
            stop = self.options.on_failure == "abort"
            failure = f"step {step}: no save is made until the store is back: {error}"
            outcome = StepOutcome(step, "the store is out of reach", failures=(failure,), stop=stop)
            outcome = replace(outcome, newest=self._progress.newest)
        self._next_step = step + 1
        self._progress = replace(self._progress, last_step=step, saved=outcome.saving, newest=outcome.newest)
        heed(outcome, self.options)
        return outcome

    def before_update(self) -> None:
        """The next update begins: returns when no copy of the last step's state runs. Only for loops whose updates do
        not go through torch optimizers (those are held back by a hook)."""
        self._must_lead("before_update")
        self._link.call("before_update", timeout_s=self.options.snapshot_deadline_s + CALL_S)

    # -- for any job

    def save(
        self, tag: str | None = None, *, deadline_s: float | None = None, reason: str = "", from_memory: bool = False
    ) -> SaveHandle:
        """Asks for a checkpoint of the last finished step, from any job of the cluster; returns at once.

        While the members only roll out it is made at once; during an update it waits for that update's end.
        `deadline_s`: seconds from now until it must be committed, or it fails and leaves everything as it was; a
        deadline that past saves of this run would not have met fails at once and says which phase would be late. (By
        the clocks of this host and the coordinator's.)
        `from_memory`: the newest snapshot that lies in memory (option snapshot_freq), whatever the members do now.
        Raises OptionsError for a tag that cannot be part of a path, DeadlineError when the coordinator does not answer
        in time.
        """
        if tag is not None:
            check_name("tag", tag)
        if deadline_s is not None and not deadline_s > 0:
            raise OptionsError(f"deadline_s is {deadline_s}; it takes seconds, above 0. Nothing was touched.")
        why = reason or "asked for by hand"
        request = SaveRequest(ulid(), SaveKind.MANUAL, why, tag, _who(), deadline_s, from_memory, time.time())
        limit_s = CALL_S if deadline_s is None else _bound(deadline_s)
        return SaveHandle(self._link, request, self._link.call("save", request, timeout_s=limit_s))

    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint that is known, newest first."""
        return self._link.call("checkpoints", timeout_s=CALL_S)

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint; None when there is none yet."""
        return next((found for found in self.checkpoints() if found.committed), None)

    def watch(self, since: Checkpoint | None = None) -> Iterator[Checkpoint]:
        """Yields each checkpoint when it is committed, and again when it is durable; ends when the run does.

        `since`: begin with what is newer than this one (from `latest`); default: with what is new from now on.
        A job that evaluates a checkpoint reads it while the run may already delete older ones: keep enough of them.
        """
        known = self.checkpoints()
        if since is not None:
            known = [c for c in known if (c.epoch, c.sequence) <= (since.epoch, since.sequence)]
        seen = {checkpoint.attempt: checkpoint.durable for checkpoint in known}
        while True:
            try:
                found: list[Checkpoint] = self._link.call("changed", seen, POLL_S, timeout_s=CALL_S)
            except UsageError:
                return  # the coordinator has ended
            for checkpoint in found:
                seen[checkpoint.attempt] = checkpoint.durable
                yield checkpoint

    def story(self, step: int) -> tuple[Story, ...]:
        """Every attempt at saving `step`, oldest first: who asked, who gave what, what happened when."""
        return self._link.call("stories", step, timeout_s=CALL_S)

    def status(self) -> dict[str, Any]:
        """How the run stands, as JSON-able values."""
        return self._link.call("status", timeout_s=CALL_S)

    def close(self, timeout_s: float | None = None, *, save_last: bool | None = None) -> None:
        """Ends the run: the last step is committed, everything committed is durable, lastgood's processes are gone.

        `save_last`: whether the last step must be committed; default: option save_last. From a job that only connected
        it just lets go. Raises SaveFailedError or DeadlineError when that was not
        reached; then the coordinator stays and goes on. Idempotent.
        """
        if self._closed or not self._leads:
            self._closed = True
            return
        limit_s = end_limit_s(self.options, timeout_s)
        request_id = ulid()
        progress = self._progress
        if not (self.options.save_last if save_last is None else save_last):
            progress = replace(progress, last_step=None)
        drained = self._link.call("finish", limit_s, request_id, progress, timeout_s=limit_s + CALL_S)
        check_drained(self.name, drained, limit_s)
        self._closed = True
        sigterm.forget(self.name)
        for handle in {handle._actor_id: handle for group in self._handles.values() for handle in group}.values():
            try:
                ray.get(handle.__ray_call__.remote(leave_actor, self.name), timeout=CALL_S)
            except ray.exceptions.RayError as error:
                log.info("a member was gone at close: %s", error)
        self._handles.clear()
        leave(self.name)
        try:
            self._link.call("end", progress.memberships, timeout_s=CALL_S)
        except (UsageError, DeadlineError) as error:
            log.debug("the coordinator has ended: %s", error)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()

    def save_before_the_end(self) -> None:
        """What SIGTERM does first: commits the last finished step unless it is committed, and waits for durable too.

        Returns within option preemption_wait_s; the save itself has no deadline of its own: once it is copied it
        commits without this process. May be called from any thread. Raises SaveFailedError or DeadlineError.
        """
        until = time.monotonic() + self.options.preemption_wait_s
        request = SaveRequest(ulid(), SaveKind.FINAL, "SIGTERM in the driver", None, _who())
        link = CoordinatorLink(self.name)  # another thread may be in a call of ours
        outcome = link.call("save", request, timeout_s=self.options.preemption_wait_s)
        handle = SaveHandle(link, request, outcome)
        outcome = handle.wait(SaveState.COMMITTED, max(0.0, until - time.monotonic()))
        log.warning("step %s of run %s is committed (attempt %s)", outcome.step, self.name, outcome.attempt)
        try:
            handle.wait(SaveState.DURABLE, max(0.0, until - time.monotonic()))
        except DeadlineError as error:
            log.warning("it stands on the nodes' disks: %s", error)

    def _must_lead(self, what: str) -> None:
        if not self._leads:
            raise UsageError(
                f"{what} is the driver's: this job only connected to run {self.name}. Nothing was touched; use "
                "lastgood.attach in the driver.",
                run=self.name,
            )


def _check_call(role: str, handles: Any, state: Any, rank: Any) -> None:
    """Raises UsageError or MembershipError for arguments of add_members that are something else than they should be."""
    if not callable(state):
        raise UsageError(
            f"add_members({role!r}): state is a {type(state).__name__}; it takes a function that is called in each "
            "actor's process and returns what holds its state: state=lambda worker: {'model': worker.model}. Nothing "
            "was touched. (The driver's own objects go to add_driver.)",
            role=role,
        )
    if rank is not None and not callable(rank):
        raise UsageError(
            f"add_members({role!r}): rank is {rank!r}; it takes a function that is called in each actor's process: "
            "rank=lambda worker: (worker.rank, world_size). Nothing was touched.",
            role=role,
        )
    if not isinstance(handles, Sequence):
        raise UsageError(
            f"add_members({role!r}) takes a list of Ray actor handles, and was given {handles!r}. Nothing was touched.",
            role=role,
        )
    if not handles:
        raise MembershipError(f"add_members({role!r}) was given no actors. Nothing was touched.", role=role)


def start_stager(options: Options, ray_node: str) -> None:
    """Starts the run's stager on a node unless it lives. Raises StagingError or OptionsError telling why it cannot."""
    handle = create_stager(options, ray_node)
    try:
        ray.get(handle.identity.remote(), timeout=CALL_S)
    except ray.exceptions.RayTaskError as error:
        ray.kill(handle, no_restart=True)
        raise (error.cause if isinstance(error.cause, LastgoodError) else error) from None
    except ray.exceptions.RayError as error:
        raise MembershipError(f"the stager on Ray node {ray_node} does not start: {error}", node=ray_node) from error


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()} pid {os.getpid()}"
