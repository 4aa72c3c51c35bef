"""`lastgood demo`: a real, small GRPO run on two Ray nodes, killed twice and resumed bit for bit.

Importing this package imports nothing heavy: torch, transformers and Ray come in when the demo runs.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ...storage.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_STEPS = 12
DEFAULT_SAVE_FREQ = 3
_EXTRA = ("transformers", "torchdata")


def run_demo(
    *,
    steps: int = DEFAULT_STEPS,
    save_freq: int = DEFAULT_SAVE_FREQ,
    keep: Path | None = None,
    json_output: bool = False,
    console: Console,
) -> int:
    """Runs the demo and returns the exit code: 0 when everything was exact and every kill was survived, else 1.

    `keep`: an empty or new directory in which the checkpoints stay; without it they are deleted. With `json_output`
    progress goes to standard error, and standard output gets one line: the report as JSON.
    Raises UsageError when the extra `demo` is not installed, the numbers do not fit, or `keep` is not empty.
    """
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the demo needs {' and '.join(missing)}, not installed here; run: pip install 'lastgood[demo]'",
            missing=missing,
        )
    from rich.console import Console

    from .recipe import Recipe
    from .scenario import play

    recipe = Recipe(steps=steps, save_freq=save_freq)
    shown_on = Console(stderr=True) if json_output else console
    # A console of its own, tied to the stream as it is now: the demo sets sys.stdout aside while Ray runs.
    screen = Console(file=shown_on.file, force_terminal=shown_on.is_terminal, width=shown_on.width)
    if keep is not None:
        report = play(recipe, keep.expanduser().resolve(), screen, kept=True)
    else:
        with tempfile.TemporaryDirectory(prefix="lastgood-demo-", ignore_cleanup_errors=True) as directory:
            report = play(recipe, Path(directory), screen, kept=False)
    report.show(screen)
    if json_output:
        sys.stdout.write(report.to_json() + "\n")
        sys.stdout.flush()
    return 0 if report.passed else 1
