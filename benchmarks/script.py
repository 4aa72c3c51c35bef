"""What the benchmarks have in common: options, and a table on stdout or JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any


def run(about: str | None, measure: Callable[..., Any], text: Callable[[Any], str], **defaults: float | str) -> int:
    """Parses the command line, measures and prints. `defaults`: of each option, given to `measure` by name.

    `measure` answers a dataclass or a list of them. What it prints itself (Ray does, of killed processes) goes
    to stderr.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--rows", type=Path, help="also write the JSON into this file")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default or 'all'}")
    options = vars(parser.parse_args())
    as_json, rows = options.pop("json"), options.pop("rows")
    with contextlib.redirect_stdout(sys.stderr):
        found = measure(**options)
    told = json.dumps([asdict(each) for each in found] if isinstance(found, list) else asdict(found)) + "\n"
    if rows is not None:
        rows.write_text(told)
    sys.stdout.write(told if as_json else text(found))
    return 0
