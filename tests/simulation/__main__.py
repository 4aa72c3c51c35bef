"""`python -m tests.simulation --seeds 1000000`: random schedules of the protocol on one core, hours if you like."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.report import run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so many minutes")
    options = parser.parse_args()
    tally = run_seeds(range(options.first, options.first + options.seeds), minutes=options.minutes)
    for failure in tally.failures:
        sys.stdout.write(f"{failure}\n\n")
    sys.stdout.write(f"{tally}; seeds {options.first} to {options.first + tally.schedules - 1}\n")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
