"""`python -m benchmarks.emergency [--minutes 12]`: how many saves that somebody asks for arrive in time.

A run whose rollouts are one long method of every actor; another job asks for a save with a deadline at random moments,
also during updates. A save has arrived when it is committed before its deadline.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import ray

import lastgood

from .ranks import new_ranks, rank_of, ray_of_its_own, roots, state

MEMBERS = 2
RUN = "emergency"


@dataclass(frozen=True)
class Asked:
    """One request: what came of it, and wall seconds from asking to the answer."""

    at_s: float
    committed: bool
    took_s: float
    why: str = ""


class Operator:
    """Another job of the cluster."""

    def ask(self, count: int, minutes: float, deadline_s: float, seed: int) -> list[Asked]:
        """Asks at `count` random moments, one after another."""
        run = lastgood.connect(RUN)
        drawn = random.Random(seed)
        moments = sorted(drawn.uniform(0.0, minutes * 60.0) for _ in range(count))
        began = time.monotonic()
        told = []
        for number, moment in enumerate(moments):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            asked = time.monotonic()
            try:
                run.save(tag=f"emergency_{number}", deadline_s=deadline_s).wait("committed", deadline_s)
                told.append(Asked(asked - began, True, time.monotonic() - asked))
            except lastgood.errors.LastgoodError as error:
                told.append(Asked(asked - began, False, time.monotonic() - asked, str(error)))
        return told


def measure(options: argparse.Namespace) -> list[Asked]:
    with ray_of_its_own() as folder:
        ranks = new_ranks(MEMBERS, options.megabytes)
        run = lastgood.attach(RUN, **roots(folder), save_freq=10**9)
        run.add_members("actor", ranks, state=state, rank=rank_of)
        run.resume()
        operator: Any = ray.remote(Operator).options(num_cpus=0).remote()
        asking = operator.ask.remote(options.requests, options.minutes, options.deadline, options.seed)
        step = run.next_step
        while not ray.wait([asking], timeout=0)[0]:
            ray.get([rank.roll_out.remote(options.rollout) for rank in ranks])
            ray.get([rank.update.remote() for rank in ranks])
            run.end_step(step)
            step += 1
        told = ray.get(asking)
        run.close(save_last=False)
        return told


def text(told: list[Asked], options: argparse.Namespace) -> str:
    arrived = [each for each in told if each.committed]
    took = sorted(each.took_s for each in arrived)
    lines = [
        f"{len(arrived)} of {len(told)} saves were committed within {options.deadline:.0f} s "
        f"({100 * len(arrived) / len(told):.0f} %): {MEMBERS} ranks with {options.megabytes:.0f} MB each, rollouts of "
        f"{options.rollout:.0f} s."
    ]
    if took:
        p95 = took[int(len(took) * 0.95)]
        lines.append(f"From asking to committed: median {statistics.median(took):.2f} s, p95 {p95:.2f} s.")
    lines += [f"not in time, asked after {each.at_s:.0f} s: {each.why}" for each in told if not each.committed]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=12.0, help="for so long requests are made")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rollout", type=float, default=300.0, help="seconds of one rollout")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds that each request gives")
    parser.add_argument("--megabytes", type=float, default=200.0, help="state of each rank, 10^6 bytes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of sentences")
    options = parser.parse_args()
    told = measure(options)
    sys.stdout.write(json.dumps([asdict(each) for each in told]) + "\n" if options.json else text(told, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
