"""The README's first command, as a newcomer runs it: a real GRPO run through two kills, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lastgood.storage.verify import find_committed, verify_attempt


def test_the_demo_is_exact_through_both_kills_and_leaves_whole_checkpoints(tmp_path: Path) -> None:
    program = str(Path(sys.executable).parent / "lastgood")
    kept = tmp_path / "kept"
    done = subprocess.run(
        [program, "demo", "--json", "--steps", "9", "--save-freq", "3", "--keep", str(kept)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["exact"] is True
    assert told["kills_survived"] == 2
    assert told["problems"] == []
    assert len(told["resumed_from"]) == 1
    found = find_committed(next((kept / "store").iterdir()))
    assert not found.rejected
    assert len(found.committed) == told["saves"] >= 2
    for checkpoint in found.committed:
        assert verify_attempt(checkpoint.path, checkpoint.manifest) == []
