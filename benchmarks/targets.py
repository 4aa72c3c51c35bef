"""The goals that the benchmarks are held to: a value out of their rows, and whether it is reached. Pure.

Each goal is a ratio within one run, or milliseconds on the machine it ran on. A goal whose rows were not measured is
left out; one that is missed is told as such.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Rows = Any  # what a benchmark printed as JSON
Found = Mapping[str, Rows]  # by the benchmark's name

OPERATORS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}
ALLOCATOR_MB = 1.0  # growth below it is the allocator's: a leak of a save would be seen 150 times


@dataclass(frozen=True)
class Goal:
    """What is wanted of one value."""

    name: str
    value: float
    op: str
    target: float
    met: bool

    @classmethod
    def of(cls, name: str, value: float, op: str, target: float) -> Goal:
        return cls(name, value, op, target, OPERATORS[op](value, target))


def _row(rows: Rows, key: str, name: str) -> Mapping[str, Any]:
    found = [row for row in rows if row[key] == name]
    assert len(found) == 1, f"{name!r} is in {len(found)} rows"
    return found[0]


def _staging(found: Found) -> Iterator[Goal]:
    row = _row(found["staging"], "way", "as stagers do: direct, hashed")
    yield Goal.of("staging over the raw disk", row["of_raw"], ">=", 0.95)
    yield Goal.of("staging: CPU s per GB", row["cpu_s_per_gb"], "<=", 1.1)


def _reading(found: Found) -> Iterator[Goal]:
    row = _row(found["reading"], "name", "as a resume does: direct, verified")
    yield Goal.of("reading for a resume over the raw disk", row["of_disk"], ">=", 0.8)


def _steps(found: Found) -> Iterator[Goal]:
    for what, target_ms in (
        ("end_step by a driver, 2 members, a save due", 30),
        ("end_step by a driver, 32 members, a save due", 150),
        ("end_step by a driver, 2 members, nothing due", 2),
        ("end_step at a member that leads itself, nothing due", 1),
    ):
        yield Goal.of(f"{what}: ms", _row(found["steps"], "what", what)["median_ms"], "<=", target_ms)


def _stall(found: Found) -> Iterator[Goal]:
    rows = found["stall"]
    memcpy, blocking, overlapped = (
        _row(rows, "what", what)["median_s"]
        for what in ("one memcpy of the state", "a save, blocking", "a save, overlapped")
    )
    yield Goal.of("blocking stall over a memcpy", blocking / memcpy, "<=", 1.2)
    if "steps" in found:
        due = _row(found["steps"], "what", "end_step by a driver, 2 members, a save due")["median_ms"] / 1e3
        beyond = max(0.0, overlapped - due) / memcpy
        yield Goal.of("overlapped: lost beyond coordination, over a memcpy", beyond, "<=", 0.1)
    first = _row(rows, "what", "the first save, of the second step")["median_s"]
    yield Goal.of("first save's stall over the warm one", first / blocking, "<=", 1.5)


def _peers(found: Found) -> Iterator[Goal]:
    cost = {row["way"]: row for row in found["peers"]}
    ours = cost["lastgood, blocking"]
    for way, target in (
        ("dcp.async_save, thread", 5),
        ("dcp.async_save, process", 5),
        ("as verl: torch.save", 8),
    ):
        yield Goal.of(f"stall: {way} over ours, blocking", cost[way]["stall_s"] / ours["stall_s"], ">=", target)
    for way, target in (("dcp.save", 3), ("torch.save and fsync", 1.1)):
        yield Goal.of(f"to committed: {way} over ours", cost[way]["safe_s"] / ours["safe_s"], ">=", target)
    dcp = min(cost[f"dcp.async_save, {kind}"]["step"] for kind in ("thread", "process"))
    yield Goal.of("a step beside a save, over the same beside dcp.async_save", ours["step"] / dcp, "<", 1)


def _rivals(found: Found) -> Iterator[Goal]:
    """Against the fastest way that returns only when the state may change; "equal" allows for a tenth of spread."""
    stalls = {row["way"]: row["stall_s"] for row in found["rivals"] if row["stall_s"] is not None}
    if "peers" not in found:
        return
    cost = {row["way"]: row["stall_s"] for row in found["peers"]}
    at_once = ("dlrover, to memory", "lm-resiliency, to memory and peer")
    fastest = min([cost["dcp.async_save, process"], *(stalls[way] for way in at_once if way in stalls)])
    yield Goal.of("stall: the fastest peer over ours, blocking", fastest / cost["lastgood, blocking"], ">=", 0.9)
    yield Goal.of("stall: the fastest peer over ours, overlapped", fastest / cost["lastgood, overlapped"], ">=", 5)
    if "torch-checkpointing, async" in stalls:
        ratio = stalls["torch-checkpointing, async"] / cost["lastgood, overlapped"]
        yield Goal.of("stall: torch-checkpointing and its lock over ours, overlapped", ratio, ">=", 1)


def _resume(found: Found) -> Iterator[Goal]:
    def restore_s(way: str) -> float:
        ways = [each for each in found["resume"]["ways"] if each["way"] == way and each["read_from"] == "disk"]
        return ways[0]["phases"]["restore_s"]["median_s"]

    ratio = restore_s("dcp.load") / restore_s("lastgood, ranks and stager died")
    yield Goal.of("restore from the cold disk: dcp.load over ours", ratio, ">=", 2)


def _footprint(found: Found) -> Iterator[Goal]:
    for row in found["footprint"]:
        target = {"MB": 64.0, "bytes": 0.0, "raw copies": 1.3}[row["unit"]]
        if row["what"].startswith("growth"):
            target = ALLOCATOR_MB
        yield Goal.of(f"{row['what']}: {row['unit']}", row["value"], "<=", target)


SECTIONS: dict[str, Callable[[Found], Iterator[Goal]]] = {
    "staging": _staging,
    "reading": _reading,
    "steps": _steps,
    "stall": _stall,
    "peers": _peers,
    "rivals": _rivals,
    "resume": _resume,
    "footprint": _footprint,
}


def goals(found: Found) -> list[Goal]:
    """Of the benchmarks that were run."""
    return [goal for name, section in SECTIONS.items() if name in found for goal in section(found)]


def text(reached: list[Goal]) -> str:
    lines = ["| goal | measured | wanted | |", "| --- | --- | --- | --- |"]
    for each in reached:
        told = "reached" if each.met else "**missed**"
        lines.append(f"| {each.name} | {each.value:,.2f} | {each.op} {each.target:g} | {told} |")
    return "\n".join(lines) + "\n"
