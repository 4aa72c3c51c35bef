"""Sums up campaigns: the records of any number of them make one table of who was broken how, in which phase."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.plan import KINDS, SAID

ORDER = (
    "start",
    "resume",
    "update",
    "mark",
    "pause",
    "snapshot",
    "release",
    "stage",
    "accept",
    "publish",
    "upload",
    "complete",
    "small file",
    "retention",
    "abort",
    "recovery",
    "close",
)


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The records of files; a trial that was run again counts as it came out last."""
    found = {}
    for path in paths:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found[record["seed"], record["trial"]] = record
    return list(found.values())


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: one row for each victim and kind of fault, one column for each phase that was hit."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        for fault in record["faults"]:
            if fault["fired"]:
                counts[fault["victim"], fault["kind"], fault["phase"]] += 1
    phases = [phase for phase in ORDER if any(key[2] == phase for key in counts)]
    unknown = {key[2] for key in counts} - set(ORDER)
    assert not unknown, f"phases without a column: {unknown}"
    rows = [
        (SAID[victim], KINDS[kind], [counts[victim, kind, phase] for phase in phases])
        for victim in SAID
        for kind in KINDS
        if any(key[:2] == (victim, kind) for key in counts)
    ]
    lines = [
        f"| victim | fault | {' | '.join(phases)} | all |",
        f"| --- | --- | {' | '.join('---' for _ in phases)} | --- |",
        *(
            f"| {victim} | {kind} | {' | '.join(str(n or '') for n in numbers)} | {sum(numbers)} |"
            for victim, kind, numbers in rows
        ),
        f"| all | | {' | '.join(str(sum(row[2][i] for row in rows)) for i in range(len(phases)))} "
        f"| {sum(counts.values())} |",
    ]
    return "\n".join(lines)


def summary(records: Sequence[dict[str, Any]]) -> str:
    """A few sentences before the table."""
    failed = [record for record in records if not record["ok"]]
    fired = [fault for record in records for fault in record["faults"] if fault["fired"]]
    took = [record["took_s"] for record in records]
    planned = sum(len(record["faults"]) for record in records)
    seeds = sorted({record["seed"] for record in records})
    lines = [
        f"{len(records)} trials (seeds {', '.join(map(str, seeds))}), {len(records) - len(failed)} without a fault "
        f"found; {len(fired)} faults fired ({planned - len(fired)} more were planned and found no victim or no such "
        f"moment); {sum(r['commits'] for r in records)} commits, {sum(r['lives'] for r in records)} "
        f"driver processes; {sum(took) / 60:.0f} minutes, {sum(took) / max(1, len(took)):.1f} s a trial.",
    ]
    lines += [f"- seed {r['seed']} trial {r['trial']} failed: {r['why'].splitlines()[0]}" for r in failed]
    return "\n".join(lines)
