"""The generated parts of docs/protocol.md: the state diagram and the tables, written from the tables the core runs by.

`python -m lastgood.coordinator.diagram docs/protocol.md` renews them; a test compares the committed file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from .moves import MOVES, WHEN, Phase
from .settings import Deadlines

_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def state_diagram() -> str:
    """The moves as a mermaid state diagram; the same text for the same table."""
    lines = [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> requested: a save is due or asked for",
        "    [*] --> found: recovery",
    ]
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for (phase, cause), to in MOVES.items():
        arrows.setdefault((phase, to), []).append(cause.value)
    for (phase, to), causes in arrows.items():
        lines.append(f"    {phase.value} --> {to.value}: {', or '.join(causes).replace(':', ' -')}")
    lines += ["    durable --> [*]", "    aborted --> [*]", "```"]
    return "\n".join(lines) + "\n"


def event_table() -> str:
    """Which event is worked on in which phase, and where it is merely late, as a markdown table."""
    lines = ["| event | worked on in | late in (changes nothing) |", "| --- | --- | --- |"]
    for kind, (work, late) in WHEN.items():
        names = [", ".join(phase.value for phase in phases) or "-" for phases in (work, late)]
        lines.append(f"| {kind.__name__} | {names[0]} | {names[1]} |")
    return "\n".join(lines) + "\n"


def deadline_table() -> str:
    """Every deadline with its default, as a markdown table."""
    lines = ["| deadline | default, s |", "| --- | --- |"]
    lines += [f"| `{name}` | {value:g} |" for name, value in vars(Deadlines()).items()]
    return "\n".join(lines) + "\n"


def render(text: str) -> str:
    """The page with every generated block renewed."""
    parts = {"states": state_diagram, "events": event_table, "deadlines": deadline_table}
    return _BLOCK.sub(lambda block: block[1] + parts[block[2]]() + block[3], text)


def main() -> None:
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
