"""Another job of the cluster that looks at the run all the time: `python -m tests.chaos.witness ERRAND.json`.

Writes down every checkpoint that the coordinator says is committed, as soon as it says so: none of those may be lost.
It also asks for saves of its own, with a tag and a deadline, while the driver trains and things break.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from pathlib import Path

import ray
import ray.exceptions

import lastgood
from lastgood.coordinator.names import NAMESPACE, coordinator_name
from tests.chaos.journal import Journal

POLL_S = 0.15
ANSWER_S = 1.0
ASK_EVERY_S = 0.7
SAVE_S = 8.0


class Asker(threading.Thread):
    """Saves a run by hand, one save after the other, and writes down what it was told of each."""

    def __init__(self, run: str, journal: Journal) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._journal = journal
        self.over = False

    def run(self) -> None:
        number = 0
        while not self.over:
            number += 1
            time.sleep(ASK_EVERY_S)
            try:
                save = lastgood.connect(self._run).save(tag=f"by-hand-{number}", deadline_s=SAVE_S)
                told = save.wait("committed", timeout_s=2 * SAVE_S)
            except (lastgood.errors.LastgoodError, ray.exceptions.RayError) as error:
                self._journal.tell("not saved", why=f"{type(error).__name__}: {error}")
                continue
            self._journal.tell(
                "committed",
                attempt=told.attempt,
                step=told.step,
                order=[told.epoch, told.sequence],
                state=told.state.value,
                by_hand=True,
            )


def main(path: str) -> None:
    errand = json.loads(Path(path).read_text())
    ray.init(address=errand["address"], namespace="chaos", log_to_driver=False)
    seen: set[tuple[str, str]] = set()
    journal: Journal | None = None
    asker: Asker | None = None
    run = ""
    while True:
        time.sleep(POLL_S)
        now = json.loads(Path(path).read_text())
        if now["run"] != run:
            run, seen = now["run"], set()
            journal = Journal(Path(now["folder"]) / "witness.jsonl")
            if asker is not None:
                asker.over = True
            asker = Asker(run, journal)
            asker.start()
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            handle = ray.get_actor(coordinator_name(run), namespace=NAMESPACE)
            for found in ray.get(handle.checkpoints.remote(), timeout=ANSWER_S):
                if not found.committed or (found.attempt, found.state.value) in seen:
                    continue
                seen.add((found.attempt, found.state.value))
                if journal is not None:
                    journal.tell(
                        "committed",
                        attempt=found.attempt,
                        step=found.step,
                        order=[found.epoch, found.sequence],
                        state=found.state.value,
                    )


if __name__ == "__main__":
    main(sys.argv[1])
