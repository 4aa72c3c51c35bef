"""A rank that leads itself: the training loop runs inside each rank, and every rank calls end_step. No driver.

Nothing is decided here: the coordinator grants how far a rank may go on (workers/pace.py keeps that), and within its
grant end_step makes no call at all. resume and close are done by all ranks together.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from ..coordinator.actor import create_coordinator
from ..coordinator.catalog import Checkpoint
from ..coordinator.messages import Line, RankClaim, RankReport
from ..coordinator.options import Options
from ..coordinator.outcomes import DrainOutcome, StepOutcome
from ..coordinator.ray_names import session_dir
from ..coordinator.restore import Restored
from ..storage.errors import (
    DeadlineError,
    LastgoodError,
    MembershipError,
    NotACheckpointError,
    OptionsError,
    UsageError,
)
from ..storage.ids import ulid
from ..storage.layout import check_name
from ..workers.install import agent_of, leave
from ..workers.member import Member
from ..workers.ray_link import RayStagerLink
from . import train_pointer
from .attach import connect_ray
from .leading import (
    changed_options,
    check_drained,
    end_limit_s,
    heed,
    metrics_of,
    other_version,
    resume_mode,
    resume_terms,
)
from .link import CALL_S, CoordinatorLink
from .run import start_stager

log = logging.getLogger("lastgood")

POLL_S = 2.0  # one long poll while the others join
RETELL_S = 1.0  # between two reports of a rank that waits for its grant
CHECK_S = 5.0  # for the question whether this rank still counts, before it goes on alone


def member(
    run: str,
    *,
    role: str,
    rank: int,
    world_size: int,
    state: Mapping[str, Any],
    store: str | os.PathLike[str] | None = None,
    staging: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    **options: Any,
) -> LedMember:
    """Makes this process `rank` of `role` in a run whose ranks run the training loop themselves, without a driver.

    Every rank calls it, with the same options; it returns when all `world_size` ranks of the role have joined. `state`
    names the objects that hold this rank's state, such as {"model": model, "optimizer": optimizer, "rng":
    lastgood.RNG()}. Options as in attach.

    Raises MembershipError (ranks missing after register_deadline_s, doubled, or not alike), UsageError for a component
    that cannot be kept and when a driver or other processes lead the run, OptionsError, StagingError, StoreError.
    """
    settings = Options.load(config, run=run, store=store, staging=staging, **options)
    check_name("role", role)
    connect_ray(None)
    settings.check_session(session_dir())

    def start() -> Member:
        return _start_member(settings, role, rank, world_size, state)

    start().close()  # what is wrong with the state is told before anything is made in the cluster
    ray_node = ray.get_runtime_context().get_node_id()
    start_stager(settings, ray_node)
    create_coordinator(settings)
    link = CoordinatorLink(settings.run)
    _refuse_other_options(link.call("hello", timeout_s=CALL_S), settings)
    membership, started = _join(link, settings, start)
    return LedMember(settings, link, RayStagerLink(settings.run, ray_node), started, membership)


class LedMember:
    """This process as one rank of a member-led run, made by `lastgood.member`. For the training thread alone."""

    def __init__(
        self, options: Options, link: CoordinatorLink, stager: RayStagerLink, member: Member, membership: str
    ) -> None:
        self.options = options
        self.name = options.run
        self.role = member.id.role
        self.rank = member.id.rank
        self._link = link
        self._stager = stager
        self._member = member
        self._membership = membership
        self._line: Line | None = None
        self._next_step = 1
        self._newest = (0, 0)
        self._alone = False  # the coordinator was away for too long: steps go on unsaved until it is back
        self._pointers: tempfile.TemporaryDirectory[str] | None = None  # what train_checkpoint has written
        self._closed = False

    @property
    def next_step(self) -> int:
        """The first step to run: 1 from scratch, N + 1 after resuming step N."""
        return self._next_step

    def resume(
        self,
        mode: Any = None,
        *,
        allow_changes: Sequence[str] = (),
        on_reshard: Mapping[str, str] | None = None,
    ) -> Restored | None:
        """Restores every rank from a checkpoint. Every rank calls it, with the same arguments; all get the same answer.

        `mode` as in Run.resume, or what ray.train.get_checkpoint() answers, if train_checkpoint made it: exactly that
        one then, the last that was reported; "auto" also finds newer ones, committed on the nodes since. Must be called
        before the first step, also to start from scratch. Raises what Run.resume raises, UsageError when ranks ask for
        different things, DeadlineError naming ranks that did not call it within resume_deadline_s.
        """
        named = hasattr(mode, "as_directory")
        if named:
            with mode.as_directory() as folder:
                mode = train_pointer.read(Path(folder))
        terms = resume_terms(self.options, allow_changes, on_reshard)
        limit_s = terms.deadline_s + CALL_S
        chosen = resume_mode(self.options.resume if mode is None else mode)
        after = None if self._line is None else self._line.key
        arguments = (self._member.id, self._membership, after)
        line: Line
        try:
            line = self._link.call("resume_together", *arguments, chosen, terms, timeout_s=limit_s)
        except NotACheckpointError as error:
            if not named or not error.facts.get("collected"):
                raise
            log.warning("what Ray Train names was collected since, the newest is taken: %s", error)
            line = self._link.call("resume_together", *arguments, "auto", terms, timeout_s=limit_s)
        self._line = line
        self._member.pace.open(line)
        self._next_step = line.step + 1
        self._newest = line.newest
        self._alone = False
        return line.restored

    def end_step(self, step: int, metrics: Mapping[str, float] | None = None) -> StepOutcome:
        """Step `step` of this rank has ended. Saves when due; returns at once unless a checkpoint is cut at this step.

        Every rank calls it for every step, in order, between the end of one update and the start of the next. Metrics
        of rank 0 go into the manifest. Raises SaveFailedError when saves failed and on_failure says stop; otherwise a
        failure is in the outcome and the log, and the previous checkpoint stands.
        """
        pace = self._member.pace
        line = self._line
        if line is None:
            raise UsageError(
                f"{self._member.id}: end_step before resume. Nothing was touched. Call member.resume() on every rank "
                "first; it answers None from scratch.",
            )
        if isinstance(step, bool) or step != self._next_step:
            raise UsageError(
                f"{self._member.id}: end_step({step!r}), but the next step to end is {self._next_step}. Nothing was "
                "touched. Call it for every step, in order; member.next_step is the first.",
                step=step,
            )
        values = metrics_of(metrics)
        pace.ended()
        failures: list[str] = []
        try:
            self._member.mark(step)
        except LastgoodError as error:  # training goes on; a cut of this step fails by this member's own word
            failures.append(f"step {step}: {error}")
        report = RankReport(self._member.id, line.key, step, pace.step_s, values)
        waited_s = 0.0
        if pace.covers(step):
            self._alone = False
            if pace.wants_report(step):
                self._stager.tell(report)
        else:
            waited_s = self._wait(report, failures)
        self._next_step = step + 1
        outcome = self._outcome(step, pace.outcomes(step), failures, waited_s)
        pace.left()
        heed(outcome, self.options)
        return outcome

    def _wait(self, report: RankReport, failures: list[str]) -> float:
        """Waits until the grant covers the step, or the coordinator was silent for too long. Answers the seconds."""
        pace, step = self._member.pace, report.step
        began = time.monotonic()
        limit_s = self.options.return_deadline_s
        self._stager.tell(report)
        while not pace.wait(step, 0.0 if self._alone else min(RETELL_S, limit_s)):
            waited_s = time.monotonic() - began
            silent_s = min(waited_s, pace.silent_s())
            if self._alone and pace.silent_s() < limit_s:
                self._alone = False  # somebody leads again
            elif self._alone or (silent_s > limit_s and not self._member.gate.copies):
                if not self._alone:
                    self._check_still_counts()
                self._alone = True
                sentence = (
                    f"step {step}: {self._member.id} goes on unsaved, the coordinator has not been heard for "
                    f"{pace.silent_s():.0f} s (return_deadline_s is {limit_s:.0f})"
                )
                failures.append(sentence)
                return waited_s
            self._stager.tell(report, again=True)
        self._alone = False
        return time.monotonic() - began

    def _check_still_counts(self) -> None:
        """Raises MembershipError when this rank hears nothing because others have joined since."""
        assert self._line is not None
        arguments = (self._member.id, self._membership, self._line.crew)
        try:
            self._link.call("still_counts", *arguments, timeout_s=CHECK_S)
        except MembershipError:
            raise
        except LastgoodError as error:
            log.debug("nobody tells whether this rank still counts: %s", error)

    def _outcome(self, step: int, told: list[StepOutcome], failures: list[str], waited_s: float) -> StepOutcome:
        """What is told of this step, with whatever failed since the last."""
        mine = next((outcome for outcome in reversed(told) if outcome.step == step), None)
        if mine is None:
            reason = "no save was due" if not failures else "this rank goes on without its coordinator"
            mine = StepOutcome(step, reason, newest=self._newest)
        for outcome in told:
            self._newest = max(self._newest, outcome.newest)
            if outcome is not mine:
                failures.extend(outcome.failures)
        return replace(
            mine,
            stall_s=waited_s,
            failures=tuple(dict.fromkeys((*failures, *mine.failures))),
            stop=any(outcome.stop for outcome in told),
            alarms=tuple(alarm for outcome in told for alarm in outcome.alarms),
            newest=self._newest,
        )

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint of the run; None when there is none yet. One call to the coordinator."""
        return next((found for found in self._checkpoints() if found.committed), None)

    def train_checkpoint(self) -> Any | None:
        """The newest durable checkpoint as a ray.train.Checkpoint, for ray.train.report; None when there is none yet.

        It holds the checkpoint's name only, so Ray Train may copy and delete it; what is kept is for save_total_limit
        to say. `resume` takes it back from ray.train.get_checkpoint(). One call to the coordinator.
        """
        from ray.train import Checkpoint as TrainCheckpoint

        found = next((found for found in self._checkpoints() if found.durable), None)
        if found is None:
            return None
        if self._pointers is None:
            self._pointers = tempfile.TemporaryDirectory(prefix="lastgood-train-")
        folder = train_pointer.write(Path(self._pointers.name), self.options.store, self.name, found)
        return TrainCheckpoint.from_directory(str(folder))

    def _checkpoints(self) -> Sequence[Checkpoint]:
        return self._link.call("checkpoints", timeout_s=CALL_S)

    def before_update(self) -> None:
        """The next update begins: returns when no copy of the last step's state runs. Only for loops whose updates do
        not go through torch optimizers (those are held back by a hook)."""
        self._member.close_window(self.options.snapshot_deadline_s)

    def close(self, timeout_s: float | None = None, *, save_last: bool | None = None) -> None:
        """Ends the run; every rank calls it. The last step is committed, everything committed is durable, lastgood's
        processes are gone.

        `save_last`: whether the last step must be committed; default: option save_last. Raises SaveFailedError or
        DeadlineError (naming ranks that did not call it) when that was not reached. Idempotent.
        """
        if self._closed:
            return
        limit_s = end_limit_s(self.options, timeout_s)
        save = self.options.save_last if save_last is None else save_last
        arguments = (self._member.id, self._membership, self._next_step - 1, save, limit_s)
        answer: tuple[DrainOutcome, bool] = self._link.call("close_together", *arguments, timeout_s=limit_s + CALL_S)
        drained, ends = answer
        check_drained(self.name, drained, limit_s)
        self._closed = True
        leave(self.name)
        if ends:
            try:
                self._link.call("end_together", timeout_s=CALL_S)
            except (UsageError, DeadlineError) as error:
                log.debug("the coordinator has ended: %s", error)

    def __enter__(self) -> LedMember:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()


def _start_member(options: Options, role: str, rank: int, world_size: int, state: Mapping[str, Any]) -> Member:
    if not isinstance(state, Mapping) or not state:
        raise UsageError(
            f"role {role}: state is {type(state).__name__}; it takes a non-empty dict from component names to the "
            "objects that hold the state, such as {'model': model, 'optimizer': optimizer}. Nothing was touched.",
            role=role,
        )
    return Member.of(role, rank, world_size, state, hold_limit_s=options.snapshot_deadline_s)


def _join(link: CoordinatorLink, options: Options, start: Callable[[], Member]) -> tuple[str, Member]:
    """Joins with all other ranks of the role; answers the membership and the member that is registered under it.

    `start` makes the member; once more when the coordinator was restarted in the middle and all join again.
    """
    member = start()
    agent = agent_of(options.run)
    who = f"pid {os.getpid()} on {socket.gethostname()}"
    until = time.monotonic() + options.register_deadline_s
    try:
        while True:
            claim = RankClaim(
                ulid(), member.id.role, member.id.rank, member.world_size, member.component_names, agent.process, who
            )
            membership: str | None = None
            while membership is None:
                membership = link.call("join", claim, POLL_S, timeout_s=CALL_S)
            agent.add(member, membership)
            absent: tuple[str, ...] | None = ("all",)
            while absent:
                absent = link.call("joined", member.id.role, membership, POLL_S, timeout_s=CALL_S)
                if absent and time.monotonic() > until:
                    raise MembershipError(
                        f"{member.id} joined run {options.run}, and the coordinator does not see {', '.join(absent)} "
                        f"within {options.register_deadline_s:.0f} s (register_deadline_s). Nothing is saved for this "
                        "role. Is the node's stager alive (lastgood status)?",
                        missing=absent,
                    )
            if absent is not None:
                return membership, member
            member.close()
            member = start()
    except BaseException:
        member.close()
        raise


def _refuse_other_options(hello: Mapping[str, Any], options: Options) -> None:
    """Raises OptionsError when the coordinator that lives was started with other options, or is of another version."""
    changed = changed_options(options, hello)
    differences = [f"{name} is {here!r} here and {there!r} there" for name, (here, there) in changed.items()]
    if found := other_version(hello):
        differences.append(f"lastgood is {found[0]} here and {found[1]} there")
    if differences:
        raise OptionsError(
            f"the coordinator of run {options.run} lives with other options: {'; '.join(differences)}. Nothing was "
            "touched. Give every rank the same; to change them, let the run end first: by member.close(), or "
            f"{options.linger_s:.0f} s (linger_s) after its last process.",
            option=next(iter(changed), None),
            changed=sorted(changed),
        )


__all__ = ["LedMember", "member"]
