"""`python -m tests.chaos --trials 50 --seed 7`: trials on this machine; `--report FILES`: what they came to."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.chaos.campaign import run_trials
from tests.chaos.report import read, summary, table

BUILD = Path(__file__).parents[2] / "build" / "chaos"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=30, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--minutes", type=float, default=None, help="start no trial after so many minutes")
    parser.add_argument("--slots", type=int, default=2, help="raylets")
    parser.add_argument("--records", type=Path, default=None, help="the file that the trials' records are added to")
    parser.add_argument("--report", type=Path, nargs="+", default=None, help="sum these files up, and run nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the field is closed on the way out
    if options.report is not None:
        records = read(options.report)
    else:
        file = options.records or BUILD / f"seed-{options.seed}.jsonl"
        numbers = range(options.first, options.first + options.trials)
        plans = ((options.seed, number) for number in numbers)
        records = run_trials(plans, slots=options.slots, minutes=options.minutes, records=file, kept=BUILD / "failed")
    sys.stdout.write(f"\n{summary(records)}\n\n{table(records)}\n")
    return 0 if all(record["ok"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
