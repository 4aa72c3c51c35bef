"""The training driver of a trial, in a process of its own: `python -m tests.chaos.trainer ERRAND.json`.

Written as a user would: attach, add members, resume, train, end_step. It writes down the digest of every member's
state before it calls end_step, and ends with an error as any training program does; whoever started it starts it
again. The file `finale` in the trial's directory tells it to come to an end: resume into new ranks, save once more,
close.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import lastgood
from tests.chaos.journal import Journal
from tests.cluster import world as world_module
from tests.cluster.world import Rank, rank_state

POLL_S = 0.05
FIRST_SEED = 7  # of the first ranks; later ones are made unlike them, so that a resume is seen


@dataclass(frozen=True)
class Errand:
    """What a trainer is told. Paths are absolute."""

    address: str
    node_address: str | None  # of the raylet to join; None where all raylets share one address
    run: str
    folder: str  # of the trial
    slots: tuple[int, ...]  # where the ranks live, by rank
    options: dict[str, Any] = field(default_factory=dict)  # for lastgood.attach
    queue: bool = False  # the driver also owns a component that asks for pause and release
    mends_itself: bool = False  # when ranks die it makes new ones and resumes; else it ends with the error
    step_s: float = 10.0  # the longest that one update may take
    wait_s: float = 100.0  # the longest wait for anything else

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Errand:
        facts = json.loads(path.read_text())
        return cls(**{**facts, "slots": tuple(facts["slots"])})


class Queue:
    """A component that must stand still while it is copied."""

    def __init__(self) -> None:
        self.taken = 0
        self.paused = False

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]

    def pause(self) -> None:
        self.paused = True

    def release(self) -> None:
        self.paused = False


class Trainer:
    """One life of a driver."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        self.folder = Path(errand.folder)
        self.journal = Journal(self.folder / "journal.jsonl")
        self.ranks: list[Any] = []
        self.cursor: dict[str, Any] = {"seen": 0}
        self.queue = Queue()
        self.groups = 0
        self.run: Any = None

    # -- building

    def join(self) -> None:
        """Into the cluster and into the run."""
        errand = self.errand
        where: dict[str, Any] = {} if errand.node_address is None else {"_node_ip_address": errand.node_address}
        ray.init(address=errand.address, namespace="chaos", log_to_driver=False, **where)
        self.journal.tell("joined")
        self.run = lastgood.attach(
            errand.run,
            store=f"{self.folder}/store",
            staging=f"{self.folder}/node-{{label:slot}}",
            **errand.options,
        )
        self.journal.tell("attached")

    def new_ranks(self, seed: int) -> None:
        """A new generation of ranks; the old ones are ended first."""
        for rank in self.ranks:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(rank, no_restart=True)
        self.groups += 1
        rendezvous = self.folder / f"rendezvous-{time.time_ns()}"
        homes = [self.node_of(slot) for slot in self.errand.slots]
        self.ranks = [
            ray.remote(Rank)
            .options(num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(home, soft=False))
            .remote(rank, len(homes), str(rendezvous), seed)
            for rank, home in enumerate(homes)
        ]
        pids = ray.get([rank.pid.remote() for rank in self.ranks], timeout=self.errand.wait_s)
        self.journal.tell("ranks", pids=pids)

    def node_of(self, slot: int) -> str:
        """The Ray node of a slot, once exactly one lives there."""
        until = time.monotonic() + self.errand.wait_s
        while True:
            there = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Labels"].get("slot") == str(slot)]
            if len(there) == 1:
                return there[0]
            if time.monotonic() > until:
                raise TimeoutError(f"slot {slot} has {len(there)} live Ray nodes")
            time.sleep(POLL_S)

    def state(self) -> dict[str, Any]:
        """The driver's own."""
        return {"cursor": self.cursor, "queue": self.queue} if self.errand.queue else {"cursor": self.cursor}

    def start(self, seed: int) -> None:
        """New ranks, joined, and resumed from the newest checkpoint."""
        if self.run.latest() is None:  # from scratch, and this process may have trained before
            seed, self.cursor["seen"], self.queue.taken = FIRST_SEED, 0, 0
        self.new_ranks(seed)
        self.run.add_members("actor", self.ranks, state=rank_state)
        self.run.add_driver(self.state())
        self.journal.tell("registered")
        restored = self.run.resume("auto")
        if restored is None and seed != FIRST_SEED:  # what was committed is lost: everything is as at first
            self.start(FIRST_SEED)
            return
        self.journal.tell(
            "resumed",
            step=0 if restored is None else restored.step,
            attempt=None if restored is None else restored.attempt,
            rejected=[] if restored is None else restored.rejected,
            lost=[] if restored is None else restored.lost,
            **self.look(),
        )

    # -- training

    def look(self) -> dict[str, Any]:
        """The state of every member as digests and numbers."""
        digests = ray.get([rank.state_digest.remote() for rank in self.ranks], timeout=self.errand.step_s)
        return {"digests": digests, "seen": self.cursor["seen"], "taken": self.queue.taken}

    def step(self) -> Any:
        """One update, written down and ended."""
        step = self.run.next_step
        losses = ray.get([rank.train.remote() for rank in self.ranks], timeout=self.errand.step_s)
        self.cursor["seen"] += 8
        if self.errand.queue:
            self.queue.taken += 3
        self.journal.tell("step", step=step, **self.look())
        outcome = self.run.end_step(step, metrics={"loss": losses[0]})
        self.journal.tell(
            "ended",
            step=step,
            saved=outcome.saving,
            in_memory=outcome.in_memory,
            failures=outcome.failures,
            reason=outcome.reason,
        )
        return outcome

    def train(self) -> None:
        """Until the finale is asked for."""
        while not (self.folder / "finale").exists():
            try:
                self.step()
            except ray.exceptions.RayError as error:
                self.journal.tell("trouble", error=f"{type(error).__name__}: {error}")
                if not self.errand.mends_itself:
                    raise
                self.start(seed=11)

    # -- ending

    def finale(self) -> None:
        """Resumes into new ranks, saves the next step, waits until it is durable, and closes."""
        self.journal.tell("finale", checkpoints=self.checkpoints())
        self.start(seed=13)
        outcome = self.step()
        for _ in range(4):
            outcome = outcome if outcome.saving is not None else self.step()
        if outcome.saving is None:
            raise RuntimeError(f"five steps in a row were not saved: {outcome}")
        self.until(lambda: self.is_durable(outcome.saving), f"attempt {outcome.saving} durable")
        self.until(lambda: not self.queue.paused, "the queue released")
        self.journal.tell("durable", attempt=outcome.saving, step=outcome.step)
        self.run.close(timeout_s=self.errand.wait_s)
        self.journal.tell("closed")

    def checkpoints(self) -> list[dict[str, Any]]:
        return [
            {"step": c.step, "attempt": c.attempt, "state": c.state.value, "order": [c.epoch, c.sequence]}
            for c in self.run.checkpoints()
        ]

    def is_durable(self, attempt: str) -> bool:
        return any(c["attempt"] == attempt and c["state"] == "durable" for c in self.checkpoints())

    def until(self, condition: Any, what: str) -> None:
        until = time.monotonic() + self.errand.wait_s
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(f"never happened: {what}; {json.dumps(self.run.status(), default=str)}")
            time.sleep(POLL_S)


def main(path: str) -> int:
    ray.cloudpickle.register_pickle_by_value(world_module)
    trainer = Trainer(Errand.read(Path(path)))
    trainer.journal.tell("born")
    try:
        trainer.join()
        trainer.start(FIRST_SEED)
        trainer.train()
        trainer.finale()
    except Exception as error:  # noqa: BLE001 - it is written down, and the process ends with it
        traceback.print_exc()
        trainer.journal.tell("failed", error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
