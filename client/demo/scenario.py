"""The demo's story: the same run twice, once undisturbed and once through two kills, then the comparison."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from rich.console import Console

from .cluster import Places, ray_held_back, two_raylets
from .kills import Kills
from .progress import DemoProgress
from .recipe import Recipe
from .report import DemoReport, KillFact, SaveFact, compare
from .saving import Saving
from .trainer import RunResult, Trainer


def play(recipe: Recipe, root: Path, console: Console, *, kept: bool) -> DemoReport:
    """Runs the demo with all its files under `root` (new or empty); `kept`: whether the caller leaves them there.

    `console` must hold its own stream: sys.stdout is set aside meanwhile. Raises UsageError when `root` is in use, and
    whatever ends a run before its last step.
    """
    began = time.monotonic()
    places = Places(root)
    places.create()
    with ray_held_back(), DemoProgress(console, recipe.steps) as progress:
        progress.event("starting two Ray nodes")
        with two_raylets(places):
            progress.begin("undisturbed run")
            undisturbed = Trainer(recipe, on_step=progress.step, on_event=progress.event).run()
            progress.begin(f"run with a save every {recipe.save_freq} steps and two kills")
            kills = Kills(recipe, places.failpoints, progress.event)
            try:
                saving = Saving(recipe, places)
                disturbed = Trainer(
                    recipe, saving, on_step=progress.step, on_event=progress.event, before_save=kills.arm_for
                ).run()
                kills.settle()
            finally:
                kills.close()
    shutil.rmtree(places.failpoints)
    return _report(recipe, places, undisturbed, disturbed, saving, kills, seconds=time.monotonic() - began, kept=kept)


def _report(
    recipe: Recipe,
    places: Places,
    undisturbed: RunResult,
    disturbed: RunResult,
    saving: Saving,
    kills: Kills,
    *,
    seconds: float,
    kept: bool,
) -> DemoReport:
    commits, rejected = saving.commits_in_store(places)
    problems = [f"the store holds an attempt that is not whole: {reason}" for reason in rejected]
    rank, coordinator = kills.rank, kills.coordinator
    if rank.step not in commits:
        problems.append(f"the attempt of step {rank.step} did not commit although only a training rank was killed")
    elif rank.happened and saving.resumed_from != [rank.step]:
        problems.append(f"resumed from {saving.resumed_from} instead of [{rank.step}], the newest commit")
    if recipe.save_steps[-1] not in commits:
        problems.append(f"the last save, of step {recipe.save_steps[-1]}, did not commit")
    return DemoReport(
        steps=recipe.steps,
        saves=[SaveFact(step, saving.stall_s.get(step), commits.get(step)) for step in recipe.save_steps],
        kills=[
            KillFact(rank.victim, rank.step, rank.happened and bool(saving.resumed_from), rank.story),
            KillFact(
                coordinator.victim,
                coordinator.step,
                coordinator.happened and saving.last_epoch > saving.first_epoch,
                coordinator.story,
            ),
        ],
        resumed_from=saving.resumed_from,
        compared=compare(undisturbed.facts, disturbed.facts),
        rewards=disturbed.rewards,
        parameters=disturbed.parameters,
        seconds=seconds,
        checkpoints=str(places.root) if kept else None,
        problems=problems,
    )
