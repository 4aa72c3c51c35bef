"""One resume of a run: what may be resumed, what is lost, and which nodes read it. restore.py does the two phases.

A part of the service; it changes nothing of the protocol's, the service does that with what comes out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..storage.errors import ResumeError
from ..storage.layout import MANIFEST
from ..storage.verify import open_checkpoint
from .driver import Driver
from .nodes import Nodes
from .options import Options
from .restore import Candidate, Restored, ResumeTerms, ResumeTermsOrder, restore
from .runner import answer_within

log = logging.getLogger("lastgood.coordinator")


class Resuming:
    """The resumes of one incarnation."""

    def __init__(self, options: Options, led: Driver, nodes: Nodes) -> None:
        self._options = options
        self._led = led
        self._nodes = nodes

    async def restore(
        self, mode: int | str, terms: ResumeTermsOrder, remaining_s: Callable[[], float]
    ) -> Restored | None:
        """Restores every member as `mode` says; None from scratch: there never was a commit.

        `remaining_s` is asked before every wait. Raises ResumeError when what was asked for is not there or newer
        commits are lost and on_lost says refuse, and what restore.restore raises.
        """
        offered, lost = await self._candidates(mode, remaining_s)
        if mode == "auto" and (unsaved := self._led.core.memory.unsaved):
            lost = [*lost, unsaved]
        if lost and self._options.on_lost == "refuse":
            raise ResumeError(
                f"commits of run {self._options.run} are lost: {' '.join(lost)} on_lost='refuse' stops here; nothing "
                "was touched. Bring those nodes back, or continue from the newest whole checkpoint with "
                "on_lost='continue'.",
                lost=lost,
            )
        for sentence in lost:
            log.error("lost: %s", sentence)
        if not offered:
            if mode == "auto" and not lost and not self._led.checkpoints():
                return None
            raise self._nothing_there(mode, lost)
        whole_terms = ResumeTerms(self._options.run, self._led.fingerprint(), terms.allow_changes, terms.on_reshard)
        ports, members = self._nodes.with_declared_members(), self._nodes.declared_members()
        epoch, return_s = self._led.settings.epoch, self._options.return_deadline_s
        restored = await restore(offered, whole_terms, ports, members, epoch, remaining_s, return_s)
        log.warning("resumed run %s from step %d (attempt %s)", self._options.run, restored.step, restored.attempt)
        return replace(restored, lost=tuple(lost))

    def _nothing_there(self, mode: int | str, lost: Sequence[str]) -> ResumeError:
        """What was asked for is not there; what is."""
        told = "".join(f" {sentence}" for sentence in lost)
        steps = sorted({found.step for found in self._led.checkpoints() if found.committed})
        if steps:
            there = ", ".join(map(str, steps[-10:])) + (" (the newest ten)" if len(steps) > 10 else "")
            told += f" Committed are steps {there}: take one, or 'auto'."
        else:
            told += " resume='none' starts from scratch."
        what = f"step {mode}" if isinstance(mode, int) else repr(mode)
        return ResumeError(
            f"run {self._options.run} has no checkpoint to resume from (asked for {what}). Nothing was touched.{told}",
            lost=lost,
        )

    async def _candidates(self, mode: int | str, remaining_s: Callable[[], float]) -> tuple[list[Candidate], list[str]]:
        """What the resume may try, newest first, and a sentence for each newer commit that cannot be had.

        Raises NotACheckpointError or IntegrityError for a path that holds none, DeadlineError for one that hangs.
        """
        if not isinstance(mode, str) or mode in ("auto", "latest"):
            return await self._led.candidates(mode)

        def read() -> tuple[list[Candidate], list[str]]:
            found = open_checkpoint(Path(mode))
            candidate = Candidate((found.path / MANIFEST).read_bytes(), str(found.path), str(found.path))
            return [candidate], [f"{one.path} is {one.kind.value}: {one.reason}" for one in found.passed_over]

        return await answer_within(asyncio.to_thread(read), remaining_s(), mode, "what it holds")
