"""`python -m benchmarks [--gb 3] [--rounds 5] [--only stall,peers] [--json]`: all of them, held to their goals.

Each runs in a process of its own, one after the other, on a machine that should do nothing else. `--gb`: 10^9 bytes of
state of two ranks together. Tables come as they are measured; then the goals; with `--json` the last line is
{"machine": {...}, "targets": [{"name", "value", "op", "target", "met"}, ...]}.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .targets import SECTIONS, goals, text

RANKS = 2


def options_of(name: str, gb: float, rounds: int) -> list[str]:
    """What a benchmark is told."""
    size = ["--gb", f"{gb / RANKS}"] if name in ("staging", "reading") else ["--megabytes", f"{gb * 1e3 / RANKS}"]
    if name == "steps":
        return []
    return size if name == "footprint" else [*size, "--rounds", str(rounds)]


def machine() -> dict[str, Any]:
    """Where this ran."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "ray")},
    }


def measured(name: str, options: list[str], folder: Path) -> Any:
    """The rows of one benchmark; its table goes to stdout. Raises CalledProcessError."""
    rows = folder / f"{name}.json"
    sys.stdout.write(f"\n== {name} {' '.join(options)}\n\n")
    sys.stdout.flush()
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options, "--rows", str(rows)], check=True)
    sys.stdout.write(f"\n({time.monotonic() - began_s:.0f} s)\n")
    return json.loads(rows.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=3.0, help="default: 3")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--only", default=",".join(SECTIONS), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="the last line is JSON")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := sorted(set(names) - set(SECTIONS)):
        parser.error(f"there is no benchmark {unknown[0]}; there are {', '.join(SECTIONS)}")
    with tempfile.TemporaryDirectory(prefix="lastgood-bench-") as folder:
        found = {name: measured(name, options_of(name, options.gb, options.rounds), Path(folder)) for name in names}
    reached = goals(found)
    sys.stdout.write(f"\n== goals\n\n{text(reached)}")
    if options.json:
        told = {"machine": machine(), "targets": [asdict(each) for each in reached]}
        sys.stdout.write(f"{json.dumps(told)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
