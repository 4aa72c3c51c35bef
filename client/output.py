"""What the command line says: one interface, as text for people and as JSON for programs.

Results go to standard output, errors to standard error. JSON is one object on one line, with the keys that docs/cli.md
lists; they are only added to, never renamed. Both classes implement everything: no command knows which one it has.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .status_text import sentences

if TYPE_CHECKING:
    from ..coordinator.story import Story
    from .at_rest import CheckpointInfo, RejectedInfo, ShownInfo, VerifiedInfo


class Output(abc.ABC):
    """Everything that a command can tell. This is the whole surface."""

    as_json: bool
    console: Console  # where a long command may show its progress

    @abc.abstractmethod
    def latest(self, checkpoint: CheckpointInfo) -> None:
        """The newest committed checkpoint."""

    @abc.abstractmethod
    def checkpoints(self, found: Sequence[CheckpointInfo], rejected: Sequence[RejectedInfo]) -> None:
        """All committed checkpoints, newest first, and what looks like one but is not."""

    @abc.abstractmethod
    def verified(self, results: Sequence[VerifiedInfo], rejected: Sequence[RejectedInfo]) -> None:
        """What hashing every shard again has found."""

    @abc.abstractmethod
    def shown(self, shown: ShownInfo) -> None:
        """A checkpoint's manifest in short."""

    @abc.abstractmethod
    def saved(self, state: str, step: int | None, attempt: str | None) -> None:
        """How far a requested save has come."""

    @abc.abstractmethod
    def status(self, run: str, status: Mapping[str, Any]) -> None:
        """What a live run's coordinator knows."""

    @abc.abstractmethod
    def told(self, run: str, step: int, stories: Sequence[Story]) -> None:
        """Everything about the saves of one step."""

    @abc.abstractmethod
    def passed_over(self, rejected: Sequence[RejectedInfo]) -> None:
        """Warns of checkpoints that are damaged and newer than what is shown, or may be. Nothing when there is none."""

    @abc.abstractmethod
    def failed(self, error: Exception) -> None:
        """Why the command could not do it, as one message."""


def make_output(as_json: bool) -> Output:
    """The output that the command line asks for."""
    return JsonOutput() if as_json else TextOutput()


class TextOutput(Output):
    """For people. Paths are never cut; colours only on a terminal."""

    as_json = False

    def __init__(self) -> None:
        self.console = _console(stderr=False)

    def latest(self, checkpoint: CheckpointInfo) -> None:
        tag = f", tag {checkpoint.tag}" if checkpoint.tag else ""
        self._line(f"step {checkpoint.step} of run {checkpoint.run}, committed {checkpoint.committed_at}{tag}")
        self._line(checkpoint.path)

    def checkpoints(self, found: Sequence[CheckpointInfo], rejected: Sequence[RejectedInfo]) -> None:
        table = Table("step", "epoch", "sequence", "kind", "tag", "committed", "size", "attempt")
        for one in found:
            size = _size(one.nbytes)
            cells = (one.step, one.epoch, one.sequence, one.kind, one.tag or "", one.committed_at, size, one.attempt)
            table.add_row(*(_plain(str(cell)) for cell in cells))
        if found:
            self.console.print(table)
        else:
            self._line("no committed checkpoint")
        self._rejected(rejected)

    def verified(self, results: Sequence[VerifiedInfo], rejected: Sequence[RejectedInfo]) -> None:
        for one in results:
            verdict = "whole" if one.ok else f"NOT WHOLE, {sum(each.fatal for each in one.findings)} finding(s)"
            read = f"{one.shards} shard(s), {_size(one.nbytes)} read"
            self._line(f"step {one.checkpoint.step} {one.checkpoint.attempt}: {verdict} ({read})", good=one.ok)
            for finding in one.findings:
                self._line(f"  {finding.kind}: {finding.path}: {finding.detail}")
        self._rejected(rejected)

    def shown(self, shown: ShownInfo) -> None:
        for field in dataclasses.fields(shown):
            value = getattr(shown, field.name)
            if field.name == "roles" or value in (None, "", [], {}):
                continue
            if field.name == "nbytes":
                value = _size(shown.nbytes)
            elif isinstance(value, dict):
                value = ", ".join(f"{key}={item}" for key, item in value.items())
            elif isinstance(value, list):
                value = ", ".join(value)
            label = "size" if field.name == "nbytes" else field.name.replace("_", " ")
            self._line(f"{label:14} {value}")
        table = Table("role", "ranks", "component", "size")
        for role in shown.roles:
            for index, (component, nbytes) in enumerate(role.component_nbytes.items()):
                first = (role.role, str(role.world_size)) if index == 0 else ("", "")
                table.add_row(*(_plain(cell) for cell in (*first, component, _size(nbytes))))
        self.console.print(table)

    def saved(self, state: str, step: int | None, attempt: str | None) -> None:
        where = f" step {step}" if step is not None else ""
        where += f", attempt {attempt}" if attempt else ""
        self._line(f"{state}:{where}")

    def status(self, run: str, status: Mapping[str, Any]) -> None:
        for sentence, good in sentences(run, status):
            self._line(sentence, good=good)

    def told(self, run: str, step: int, stories: Sequence[Story]) -> None:
        if not stories:
            self._line(f"nothing is known of a save of step {step} of run {run}")
        for story in stories:
            tag = f", tag {story.tag}" if story.tag else ""
            self._line(f"step {story.step}, attempt {story.attempt} ({story.kind}{tag}): {story.state}")
            asked = f" (asked for by {story.requested_by})" if story.requested_by else ""
            self._line(f"  why: {story.reason or 'not known'}{asked}")
            if story.blame:
                self._line(f"  failed: {story.blame}", good=False)
            for member in story.members:
                updates = "" if member.updates is None else f", {member.updates} updates"
                self._line(f"  {member.member}: {_size(member.nbytes)}{updates}, on {member.node}")
            for when, sentence in story.events:
                self._line(f"  {when}  {sentence}")

    def passed_over(self, rejected: Sequence[RejectedInfo]) -> None:
        for one in rejected:
            sentence = _plain(f"{one.path} is newer or may be, and is {one.kind}: {one.reason}")
            _console(stderr=True).print(Text("warning: ", style="bold red") + sentence, soft_wrap=True)

    def failed(self, error: Exception) -> None:
        _console(stderr=True).print(Text("error: ", style="bold red") + _plain(str(error)), soft_wrap=True)

    def _line(self, text: str, good: bool = True) -> None:
        line = _plain(text)
        if not good:
            line.stylize("bold red")
        self.console.print(line, soft_wrap=True)

    def _rejected(self, rejected: Sequence[RejectedInfo]) -> None:
        for one in rejected:
            self._line(f"{one.kind}: {one.path}: {one.reason}", good=not one.wrong)


class JsonOutput(Output):
    """For programs: one JSON object on one line."""

    as_json = True

    def __init__(self) -> None:
        self.console = _console(stderr=True)
        self._out = Console(soft_wrap=True, highlight=False, markup=False, emoji=False, no_color=True)

    def latest(self, checkpoint: CheckpointInfo) -> None:
        self._write({"checkpoint": checkpoint})

    def checkpoints(self, found: Sequence[CheckpointInfo], rejected: Sequence[RejectedInfo]) -> None:
        self._write({"checkpoints": found, "rejected": rejected})

    def verified(self, results: Sequence[VerifiedInfo], rejected: Sequence[RejectedInfo]) -> None:
        whole = all(one.ok for one in results) and not any(one.wrong for one in rejected)
        self._write({"ok": whole, "verified": results, "rejected": rejected})

    def shown(self, shown: ShownInfo) -> None:
        self._write({"manifest": shown})

    def saved(self, state: str, step: int | None, attempt: str | None) -> None:
        self._write({"save": {"state": state, "step": step, "attempt": attempt}})

    def status(self, run: str, status: Mapping[str, Any]) -> None:
        self._write({"run": run, "status": dict(status)})

    def told(self, run: str, step: int, stories: Sequence[Story]) -> None:
        self._write({"run": run, "step": step, "stories": stories})

    def passed_over(self, rejected: Sequence[RejectedInfo]) -> None:
        if rejected:
            self._write({"warning": {"passed_over": rejected}}, to=self.console)

    def failed(self, error: Exception) -> None:
        self._write({"error": {"type": type(error).__name__, "message": str(error)}}, to=self.console)

    def _write(self, content: Mapping[str, Any], to: Console | None = None) -> None:
        # Straight to the stream: rich would interpret nothing here, but it may wrap.
        stream = (to or self._out).file
        stream.write(json.dumps(_jsonable(content)) + "\n")
        stream.flush()


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 240  # a pipe or a log has no width: do not fold ids at column 80
    return console


def _plain(text: str) -> Text:
    """Text that cannot steer a terminal: what is read from a checkpoint may hold anything."""
    return Text(
        "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)
    )


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return _jsonable(value.value)
    if isinstance(value, Mapping):
        return {str(_jsonable(key)): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has neither NaN nor infinities
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
