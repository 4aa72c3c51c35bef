"""docs/protocol.md shows the tables that the core runs by."""

from __future__ import annotations

from pathlib import Path

from lastgood.coordinator.diagram import render
from lastgood.coordinator.moves import MOVES

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_diagram_and_the_tables_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert render(text) == text, "run: python -m lastgood.coordinator.diagram docs/protocol.md"


def test_every_move_is_an_arrow_of_the_diagram() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"    {phase.value} --> {to.value}: " in text for (phase, _), to in MOVES.items())
