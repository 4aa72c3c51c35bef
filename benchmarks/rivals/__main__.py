"""`python -m benchmarks.rivals [--megabytes 400] [--rounds 5] [--only NAME] [--json]`: a save in other libraries.

As benchmarks/peers.py, for libraries that the project does not install: each gets an environment of its own under
build/rivals/, made on first use (from the network; Orbax takes 600 MB). Every way runs alone, in two fresh
processes, one way after the other; medians of so many rounds after one that warms up. Wall seconds:

stall    the save is called -> it returned on every rank and the state may change again (call: only the first)
first    the same, of the very first save
on disk  the save is called -> all of it is synced; for who never syncs: with an fsync of every file, added by us
step beside it   an update while a save is in the background, in undisturbed updates

What is saved, and with which options: benchmarks/rivals/ways.py. `--only` takes a rival's name, or a way's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import script
from .environments import PINS, ROOT, RivalError, environment, last_line
from .rank import MEMBERS
from .way import Way
from .ways import WAYS

WAY_S = 1200.0  # one way, all of its rounds
POLL_S = 0.05


@dataclass(frozen=True)
class Cost:
    """Of one way: medians in wall seconds, and the spread of the stall; or the reason why there is none."""

    way: str
    rounds: int = 0
    returns_s: float | None = None  # of the stall: the call alone, where the state may change only later
    stall_s: float | None = None
    least_s: float | None = None
    most_s: float | None = None
    first_s: float | None = None
    safe_s: float | None = None  # None: the rival never syncs what it writes, or writes nothing
    safe_with_fsync_s: float | None = None  # of one that writes and does not sync
    step_s: float | None = None
    step_beside_s: float | None = None  # None: nothing runs in the background
    reason: str = ""

    @classmethod
    def of(cls, name: str, way: type[Way], found: dict[str, Any]) -> Cost:
        median = statistics.median
        stalls_s = found["stalls_s"]
        return cls(
            way=name,
            rounds=len(stalls_s),
            returns_s=None if way.settle is Way.settle else median(found["returns_s"]),
            stall_s=median(stalls_s),
            least_s=min(stalls_s),
            most_s=max(stalls_s),
            first_s=found["first_s"],
            safe_s=median(found["written_s"]) if way.syncs else None,
            safe_with_fsync_s=median(found["synced_s"]) if way.persists and not way.syncs else None,
            step_s=median(found["steps_s"]),
            step_beside_s=median(found["steps_beside_s"]) if found["steps_beside_s"] else None,
        )


def saved(name: str, megabytes: float, rounds: int) -> Cost:
    """Runs the ranks of one way in processes that are dead when this returns."""
    way = WAYS[name]
    python = environment(way.rival)
    run = f"lastgood-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory(prefix="lastgood-bench-", ignore_cleanup_errors=True) as folder:
        logs = [Path(folder, f"rank-{rank}.log") for rank in range(MEMBERS)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                words = [name, str(rank), str(megabytes), str(rounds), folder, run]
                with log.open("wb") as output:
                    ranks.append(
                        subprocess.Popen(
                            [str(python), "-m", "benchmarks.rivals.rank", *words],
                            cwd=ROOT,
                            env=_environment_of(rank, Path(folder), run),
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,  # what a rival starts is in it, and ends with it
                        )
                    )
            _ended(ranks, logs)
        finally:
            for each in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
                each.wait()
            way.sweep(run)
        try:
            return Cost.of(name, way, json.loads(Path(folder, "found.json").read_text()))
        except FileNotFoundError:
            raise RivalError("rank 0 ended without a result") from None


def _environment_of(rank: int, folder: Path, run: str) -> dict[str, str]:
    """What torchrun would set, and a directory for what rivals leave in theirs for temporary files."""
    (folder / "tmp").mkdir(exist_ok=True)
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": MEMBERS, "LOCAL_WORLD_SIZE": MEMBERS}
    group = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": run}
    words = {key: str(value) for key, value in (torchrun | group).items()}
    return {**os.environ, **words, "TMPDIR": str(folder / "tmp"), "PYTHONWARNINGS": "ignore"}


def _ended(ranks: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Waits WAY_S at most; the first rank that fails ends it."""
    until = time.monotonic() + WAY_S
    while any(each.poll() is None for each in ranks):
        _check(ranks, logs)
        if time.monotonic() > until:
            raise RivalError(f"its ranks had not ended after {WAY_S:g} s")
        time.sleep(POLL_S)
    _check(ranks, logs)


def _check(ranks: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    for rank, (each, log) in enumerate(zip(ranks, logs, strict=True)):
        if each.poll():
            raise RivalError(f"rank {rank} ended with {each.returncode}: {last_line(log.read_text(errors='replace'))}")


def measure(megabytes: float, rounds: int, only: str) -> list[Cost]:
    if rounds < 1:
        raise SystemExit("At least one round is needed after the one that warms up: --rounds 1.")
    costs: list[Cost] = []
    unusable: dict[str, str] = {}
    for name, way in WAYS.items():
        if only and only not in (name, way.rival):
            continue
        if way.rival not in unusable:
            try:
                environment(way.rival)
            except RivalError as failure:
                unusable[way.rival] = str(failure)
        try:
            if way.rival in unusable:
                raise RivalError(unusable[way.rival])
            costs.append(saved(name, megabytes, rounds))
        except RivalError as failure:
            costs.append(Cost(name, reason=str(failure)))
    if not costs:
        raise SystemExit(f"No way and no rival is called {only!r}. There are: {'; '.join([*PINS, *WAYS])}.")
    return costs


def text(found: list[Cost]) -> str:
    lines = [
        "| way | stall, s | least to most | first, s | on disk, s | step beside it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in found:
        if each.stall_s is None or each.step_s is None:
            lines.append(f"| {each.way} | not measured: {each.reason} | | | | |")
            continue
        safe = "kept in memory"
        if each.safe_s is not None:
            safe = f"{each.safe_s:.2f}"
        elif each.safe_with_fsync_s is not None:
            safe = f"never synced ({each.safe_with_fsync_s:.2f} with)"
        beside = "" if each.step_beside_s is None else f"{each.step_beside_s / each.step_s:.2f}"
        stall = f"{each.stall_s:.3f}" if each.returns_s is None else f"{each.stall_s:.3f} (call: {each.returns_s:.3f})"
        spread = f"{each.least_s:.3f} to {each.most_s:.3f}"
        lines.append(f"| {each.way} | {stall} | {spread} | {each.first_s:.2f} | {safe} | {beside} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended
    sys.exit(script.run(__doc__, measure, text, megabytes=400.0, rounds=5, only=""))
