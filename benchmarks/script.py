"""What the benchmarks that answer a list of rows have in common: options, and a table or JSON on stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any


def run(
    about: str | None, measure: Callable[..., Sequence[Any]], text: Callable[[Any], str], **defaults: float | str
) -> int:
    """Parses the command line, measures and prints. `defaults`: of each option, given to `measure` by name."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default or 'all'}")
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    found = measure(**options)
    sys.stdout.write(json.dumps([asdict(each) for each in found]) + "\n" if as_json else text(found))
    return 0
