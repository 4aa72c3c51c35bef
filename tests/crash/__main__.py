"""`python -m tests.crash --every 1 --samples 20`: the whole campaign, with more images and errors than in CI."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.crash.campaign import Campaign
from tests.crash.cluster import no_links
from tests.crash.errors import Errors
from tests.crash.memory import folder_in_memory
from tests.crash.plants import PLANTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--every",
        type=int,
        default=10,
        help="after one of so many kills a coordinator recovers, and one of so many errors happens; 1: all",
    )
    parser.add_argument("--samples", type=int, default=2, help="random images of a disk per operation")
    parser.add_argument("--plant", choices=PLANTS, default=None, help="a planted bug; the campaign must find it")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with folder_in_memory() as folder, no_links():
        tally = Campaign(folder, every=options.every, samples=options.samples, plant=options.plant).run()
        (folder / "errors").mkdir()
        errors = Errors(folder / "errors", plant=options.plant)
        broken = [*tally.broken, *errors.broken(errors.faults(options.every))]
    for sentence in broken:
        sys.stdout.write(f"{sentence}\n\n")
    sys.stdout.write(f"{tally}\n{errors}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
