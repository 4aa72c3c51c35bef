"""`python -m benchmarks.scaling [--json]`: what a commit costs the coordinator with 10, 100, 1,000 and 10,000 members.

CPU seconds of this process (all threads), the median of several commits after one that warms up; messages are counted.
What Ray adds is measured per call on a local Ray in the same run, and multiplied. docs/scaling.md holds a run and says
what it means.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .commits import Cost, HandDriven, led, reading, recovery
from .fleet import BLOCK_BYTES, MEMBERS_PER_NODE, SHARD_BYTES, Fleet

MEMBERS = (10, 100, 1000, 10_000)
CHUNKS = 4  # boxes of tensors per shard
MORE_CHUNKS = (0, 4, 16, 64)  # at CHUNK_MEMBERS members
CHUNK_MEMBERS = 1000
ATTEMPTS = (1, 4)  # found at a recovery
COMMITS = 5
COSTS = {"mark": "mark", "snapshot": "snapshot", "stage": "stage"}  # the other calls bring next to nothing back
CPU_COLUMNS = {
    "core": "core",
    "core_manifest": "core + manifest",
    "service": "whole service",
    "step": "end_step, nothing due",
    "recovery_1": "recovery, 1 attempt",
    "recovery_4": "recovery, 4 attempts",
    "heartbeat": "heartbeat",
    "read": "reading one manifest",
}


@contextmanager
def apart(fleet: Fleet) -> Iterator[Fleet]:
    """The fleet's prepared answers are no objects of the coordinator: garbage collection shall not walk over them."""
    gc.collect()
    gc.freeze()
    try:
        yield fleet
    finally:
        gc.unfreeze()
        gc.collect()


def median(measure: Callable[[int], Cost], commits: int) -> tuple[float, Cost]:
    """CPU seconds, and the last cost, of `commits` runs after one that warms up."""
    costs = [measure(n) for n in range(1, commits + 2)]
    return statistics.median(cost.cpu_s for cost in costs[1:]), costs[-1]


def row(members: int, commits: int) -> dict[str, Any]:
    """Everything about one number of members."""
    with apart(Fleet(members, CHUNKS)) as fleet:
        core = HandDriven(fleet, manifests=False)
        core.meet()
        core_s, cost = median(core.commit, commits)
        del core
        whole = HandDriven(fleet, manifests=True)
        whole.meet()
        manifest_s, manifest_cost = median(whole.commit, commits)
        service = led(fleet, commits, commits)
        cpu_s = {
            "core": core_s,
            "core_manifest": manifest_s,
            "service": statistics.median(service.saves_s),
            "step": statistics.median(service.steps_s),
            "heartbeat": service.pulse_s,
        }
        for attempts in ATTEMPTS:
            cpu_s[f"recovery_{attempts}"] = median(lambda _, k=attempts: recovery(fleet, k), commits)[0]
        cpu_s["read"] = median(lambda _: reading(whole.manifest), commits)[0]
        return {
            "members": members,
            "nodes": len(fleet.nodes),
            "shards": sum(map(len, fleet.shards.values())),
            "events": cost.events.total(),
            "commands": cost.commands.total(),
            "calls": dict(service.calls),
            "manifest_bytes": manifest_cost.manifest_bytes,
            "manifest_bytes_to_nodes": service.manifest_bytes_sent,
            "manifest_cpu_s": manifest_cost.phases_s,
            "cpu_s": cpu_s,
        }


def chunk_row(chunks: int, commits: int) -> dict[str, Any]:
    """What more boxes of tensors per shard cost."""
    with apart(Fleet(CHUNK_MEMBERS, chunks)) as fleet:
        whole = HandDriven(fleet, manifests=True)
        whole.meet()
        cpu_s, cost = median(whole.commit, commits)
        return {"chunks": chunks, "cpu_s": cpu_s, "manifest_bytes": cost.manifest_bytes}


def growth(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By what each cost grows from one row to the next; ten is linear."""
    return {
        name: [after["cpu_s"][name] / before["cpu_s"][name] for before, after in itertools.pairwise(rows)]
        for name in CPU_COLUMNS
    }


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The exponent between the two largest rows: 1 is linear, 2 quadratic."""
    before, after = rows[-2:]
    size = math.log(after["members"] / before["members"])
    return {name: math.log(after["cpu_s"][name] / before["cpu_s"][name]) / size for name in CPU_COLUMNS}


def forecast(found: dict[str, Any], calls: dict[str, Any]) -> dict[str, float]:
    """CPU and wall seconds of a save at the coordinator, Ray's share included; callees answer at once."""
    ray_cpu_s = ray_wall_s = 0.0
    for method, times in found["calls"].items():
        cost = calls[COSTS.get(method, "empty")]
        ray_cpu_s += times * cost["cpu_s"]
        ray_wall_s += times * cost["wall_s"]
    per_step = calls["mark"]["cpu_s"] + calls["empty"]["cpu_s"]  # mark and close_window
    return {
        "members": found["members"],
        "calls": sum(found["calls"].values()),
        "save_cpu_s": found["cpu_s"]["service"] + ray_cpu_s,
        "save_wall_s": found["cpu_s"]["service"] + ray_wall_s,
        "step_cpu_s": found["cpu_s"]["step"] + found["nodes"] * per_step,
        "heartbeat_cpu_s": found["cpu_s"]["heartbeat"] + found["nodes"] * calls["empty"]["cpu_s"],
    }


def machine() -> dict[str, Any]:
    """Where this was measured."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(models),
        "python": sys.version.split()[0],
    }


def table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines]) + "\n"


def text(report: dict[str, Any]) -> str:
    """The report for people, as Markdown."""
    rows = report["rows"]
    where = report["machine"]
    out = [
        f"{where['cpu']}, {where['cores']} cores, Python {where['python']}; median of {report['commits']} commits.\n"
    ]
    out.append(
        table(
            ["members", "nodes", "shards", "events", "commands", "calls per node", "manifest, MB"],
            [
                [
                    f"{r['members']:,}",
                    f"{r['nodes']:,}",
                    f"{r['shards']:,}",
                    f"{r['events']:,}",
                    f"{r['commands']:,}",
                    f"{sum(r['calls'].values()) / r['nodes']:.1f}",
                    f"{r['manifest_bytes'] / 1e6:.2f}",
                ]
                for r in rows
            ],
        )
    )
    factors, power = growth(rows), exponents(rows)
    out.append(
        table(
            ["CPU seconds", *(f"{r['members']:,}" for r in rows), "growth", "exponent"],
            [
                [
                    title,
                    *(f"{r['cpu_s'][name]:.4f}" for r in rows),
                    " / ".join(f"{factor:.1f}" for factor in factors[name]),
                    f"{power[name]:.2f}",
                ]
                for name, title in CPU_COLUMNS.items()
            ],
        )
    )
    out.append(
        table(
            [f"boxes per shard, {CHUNK_MEMBERS:,} members", "manifest, MB", "core + manifest, CPU s"],
            [[str(c["chunks"]), f"{c['manifest_bytes'] / 1e6:.2f}", f"{c['cpu_s']:.3f}"] for c in report["chunk_rows"]],
        )
    )
    if report["ray"]:
        out.append(
            table(
                ["Ray call", "payload, KB", "caller's CPU, ms", "wall, ms"],
                [
                    [name, f"{c['payload_kb']:,.1f}", f"{c['cpu_s'] * 1e3:.2f}", f"{c['wall_s'] * 1e3:.2f}"]
                    for name, c in report["ray"].items()
                ],
            )
        )
        out.append(
            table(
                [
                    "forecast: members",
                    "calls per save",
                    "save, CPU s",
                    "save, wall s",
                    "end_step, CPU s",
                    "heartbeat, CPU s",
                ],
                [
                    [
                        f"{f['members']:,}",
                        f"{f['calls']:,}",
                        *(f"{f[k]:.3f}" for k in ("save_cpu_s", "save_wall_s", "step_cpu_s", "heartbeat_cpu_s")),
                    ]
                    for f in report["forecast"]
                ],
            )
        )
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--members", type=int, nargs="+", default=list(MEMBERS), help="two numbers of members or more")
    parser.add_argument("--commits", type=int, default=COMMITS, help="measured for each median")
    parser.add_argument("--no-ray", action="store_true", help="measure no Ray calls, and forecast nothing")
    options = parser.parse_args()
    if len(options.members) < 2:
        parser.error("--members: growth needs two numbers or more")
    calls: dict[str, Any] = {}
    if not options.no_ray:
        from .ray_calls import measure

        calls = {name: dataclasses.asdict(cost) for name, cost in measure(Fleet(MEMBERS_PER_NODE, CHUNKS)).items()}
    rows = [row(members, options.commits) for members in sorted(options.members)]
    report = {
        "machine": machine(),
        "commits": options.commits,
        "members_per_node": MEMBERS_PER_NODE,
        "shard_bytes": SHARD_BYTES,
        "block_bytes": BLOCK_BYTES,
        "chunks_per_shard": CHUNKS,
        "rows": rows,
        "growth": growth(rows),
        "exponents": exponents(rows),
        "chunk_rows": [chunk_row(chunks, options.commits) for chunks in MORE_CHUNKS],
        "ray": calls,
        "forecast": [forecast(found, calls) for found in rows] if calls else [],
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n" if options.json else text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
