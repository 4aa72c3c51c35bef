"""What a person sees while the demo runs: a bar per run on a terminal, a line per step elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .trainer import StepReport


class DemoProgress:
    """Shows steps and events. Its methods may be called from any thread."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._task: TaskID | None = None
        self._title = ""
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> DemoProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, title: str) -> None:
        """A new run begins; the bar of the one before stays as it is."""
        if self._task is not None:
            self._bars.stop_task(self._task)
        self._title = title
        self._task = self._bars.add_task(title, total=self._steps, numbers="starting ranks")
        if not self._console.is_terminal:
            self._console.print(title, markup=False)

    def step(self, report: StepReport) -> None:
        """A step has ended."""
        numbers = f"reward {report.reward:.3f}  loss {report.loss:+.4f}  kl {report.kl:.3f}"
        if self._task is not None:
            self._bars.update(self._task, completed=report.step, numbers=numbers)
        if not self._console.is_terminal:
            self._console.print(f"  step {report.step}/{self._steps}  {numbers}", markup=False, highlight=False)

    def event(self, text: str) -> None:
        """Something happened that is worth a line of its own."""
        self._bars.console.print(f"  [yellow]*[/yellow] {text}", highlight=False)
