"""What the demo found: the comparison of the two runs, as a table for people and as one JSON line for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

_MISSING = "(missing)"


@dataclass(frozen=True)
class Comparison:
    """One kind of state in both runs."""

    what: str
    values: int  # how many were compared
    differences: tuple[str, ...]  # names of those that differ


def compare(undisturbed: Mapping[str, Any], disturbed: Mapping[str, Any]) -> list[Comparison]:
    """Compares two runs' facts by name, grouped by the part of the name before "/" or " (".

    A list counts as one value per element; a name that only one side has counts as different.
    """
    groups: dict[str, tuple[int, list[str]]] = {}
    for name in dict.fromkeys([*undisturbed, *disturbed]):
        mine, theirs = undisturbed.get(name, _MISSING), disturbed.get(name, _MISSING)
        group = name.partition("/")[0].partition(" (")[0]
        count, differences = groups.get(group, (0, []))
        if mine != theirs:
            differences = [*differences, name]
        groups[group] = (count + (len(mine) if isinstance(mine, list) else 1), differences)
    return [Comparison(what, count, tuple(differences)) for what, (count, differences) in groups.items()]


@dataclass(frozen=True)
class SaveFact:
    """One due save of the disturbed run, as the driver felt it and as the store tells it."""

    step: int
    stall_s: float | None  # how long end_step kept the driver
    commit_s: float | None  # from the start of the attempt to its commit; None: it did not commit


@dataclass(frozen=True)
class KillFact:
    """One kill, and whether the run outlived it."""

    victim: str
    step: int
    survived: bool
    story: str


@dataclass(frozen=True)
class DemoReport:
    """Everything the demo has to say. `exact` is the verdict."""

    steps: int
    saves: Sequence[SaveFact]
    kills: Sequence[KillFact]
    resumed_from: Sequence[int]
    compared: Sequence[Comparison]
    rewards: Sequence[float]  # mean reward per step
    parameters: int
    seconds: float
    checkpoints: str | None = None  # where they were left, if they were
    problems: Sequence[str] = field(default_factory=tuple)  # other promises that were not kept, as sentences

    @property
    def exact(self) -> bool:
        """Whether every compared value is identical, bit for bit."""
        return bool(self.compared) and not any(c.differences for c in self.compared)

    @property
    def kills_survived(self) -> int:
        """Kills that truly happened and that the run outlived."""
        return sum(kill.survived for kill in self.kills)

    @property
    def passed(self) -> bool:
        """Exact, every kill survived, and nothing else wrong: the exit code."""
        return self.exact and self.kills_survived == len(self.kills) and not self.problems

    def to_json(self) -> str:
        """The report on one line."""
        committed = [save for save in self.saves if save.commit_s is not None]
        return json.dumps(
            {
                "exact": self.exact,
                "passed": self.passed,
                "kills_survived": self.kills_survived,
                "saves": len(committed),
                "saved_steps": [save.step for save in committed],
                "lost_steps": [save.step for save in self.saves if save.commit_s is None],
                "stall_ms": [round(save.stall_s * 1000, 1) for save in self.saves if save.stall_s is not None],
                "commit_s": [round(save.commit_s, 3) for save in committed if save.commit_s is not None],
                "resumed_from": list(self.resumed_from),
                "steps": self.steps,
                "kills": [vars(kill) for kill in self.kills],
                "compared": {c.what: {"values": c.values, "identical": not c.differences} for c in self.compared},
                "differences": [name for c in self.compared for name in c.differences],
                "problems": list(self.problems),
                "rewards": [round(value, 4) for value in self.rewards],
                "parameters": self.parameters,
                "seconds": round(self.seconds, 1),
                "checkpoints": self.checkpoints,
            }
        )

    def show(self, console: Console) -> None:
        """Prints the tables."""
        console.print(self._saves_table())
        console.print(self._comparison_table())
        console.print(self._summary_table())
        for problem in self.problems:
            console.print(f"[red]not as promised:[/red] {problem}")
        if self.checkpoints:
            console.print(
                f"checkpoints left; for a look: lastgood latest {self.checkpoints}/store/grpo-demo", soft_wrap=True
            )

    def _saves_table(self) -> Table:
        table = Table("step", "training stalled", "time to commit", "what was killed meanwhile", title="Saves")
        killed = {kill.step: kill for kill in self.kills}
        for save in self.saves:
            kill = killed.get(save.step)
            table.add_row(
                str(save.step),
                "-" if save.stall_s is None else f"{save.stall_s * 1000:.0f} ms",
                "not committed: refused" if save.commit_s is None else f"{save.commit_s:.2f} s",
                kill.victim if kill else "",
            )
        return table

    def _comparison_table(self) -> Table:
        table = Table("compared with the undisturbed run", "values", "identical", title="Bit for bit")
        for comparison in self.compared:
            verdict = "[green]yes[/green]"
            if comparison.differences:
                verdict = f"[red]no, {len(comparison.differences)} differ; first {comparison.differences[0]}[/red]"
            table.add_row(comparison.what, str(comparison.values), verdict)
        return table

    def _summary_table(self) -> Table:
        committed = [save for save in self.saves if save.commit_s is not None]
        table = Table(show_header=False, title="lastgood demo")
        table.add_row("GRPO steps", f"{self.steps}, {self.parameters:,} parameters, 2 FSDP2 ranks on 2 Ray nodes")
        if self.rewards:
            table.add_row("mean reward", f"{self.rewards[0]:.3f} at the first step, {self.rewards[-1]:.3f} at the last")
        table.add_row("saves committed", f"{len(committed)} of {len(self.saves)}")
        table.add_row("kills survived", f"{self.kills_survived} of {len(self.kills)}")
        for kill in self.kills:
            table.add_row(f"  {kill.victim}", kill.story)
        table.add_row("resumed from step", ", ".join(map(str, self.resumed_from)) or "never")
        table.add_row("exact", "[bold green]yes[/bold green]" if self.exact else "[bold red]NO[/bold red]")
        table.add_row("took", f"{self.seconds:.0f} s")
        return table
