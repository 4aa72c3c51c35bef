"""The loop runs inside every rank: each calls end_step itself, and all are cut at the same step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import lastgood
from lastgood.storage.manifest import Manifest
from tests.cluster.world import LIMIT_S, Rank, World, kill, rank_state, until


class LedRank(Rank):
    """A rank whose one long method is the training loop."""

    def ready(self) -> int:
        """Answers its pid once everything that the loop needs is imported: that takes long on a busy machine."""
        assert lastgood.member is not None
        return os.getpid()

    def loop(
        self,
        name: str,
        total: int,
        root: str,
        options: dict[str, Any],
        stall: int | None = None,
        rollout_s: float = 0.0,
    ) -> dict[str, Any]:
        """Trains to step `total`, and tells its progress in a file.

        `stall`: rank 1 stops after that step's update until the file `stall.go` appears. `rollout_s`: seconds that
        each step takes beside its update.
        """
        member = lastgood.member(
            name, role="actor", rank=self.rank, world_size=torch_world_size(), state=rank_state(self), **options
        )
        restored = member.resume("auto")
        saved: list[int] = []
        failures: list[str] = []
        for step in range(member.next_step, total + 1):
            time.sleep(rollout_s)
            loss = self.train()
            if stall == step and self.rank == 1:
                wait_for(Path(root) / "stall.go")
            outcome = member.end_step(step, metrics={"loss": loss})
            saved += [step] * (outcome.saving is not None)
            failures += outcome.failures
            tell(root, self.rank, step)
            if step % 5 == 0 and step < total:
                wait_for(Path(root) / f"upto-{step + 5}.go")  # so that a story can do something in mid-run
        member.close()
        return {
            "restored": None if restored is None else restored.step,
            "saved": saved,
            "failures": failures,
            "digest": self.state_digest(),
        }


def torch_world_size() -> int:
    import torch.distributed

    return torch.distributed.get_world_size()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


def tell(root: str, rank: int, step: int) -> None:
    """Writes how far a rank has come, in one piece."""
    temporary = Path(root) / f".told-{rank}"
    temporary.write_text(str(step))
    temporary.rename(Path(root) / f"told-{rank}")


class Led:
    """A member-led run in a World."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world = world
        self.pids: list[int] = []
        defaults: dict[str, Any] = {"heartbeat_s": 0.5, "linger_s": 600, "return_deadline_s": 90.0, "save_freq": 100}
        self.options = {"store": str(world.store), "staging": world.staging, **defaults, **options}

    def start(self, total: int, *, seed: int = 7, stall: int | None = None, rollout_s: float = 0.0) -> list[Any]:
        """New ranks that train to `total`; answers what they will return."""
        nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["Labels"].get("slot", ""))
        self.world.end_ranks()
        self.world._groups += 1
        rendezvous = str(self.world.root / f"rendezvous-{self.world._groups}")
        self.world.ranks = [
            ray.remote(LedRank)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[rank]["NodeID"], soft=False))
            .remote(rank, 2, rendezvous, seed)
            for rank in range(2)
        ]
        self.pids = ray.get([rank.ready.remote() for rank in self.world.ranks])
        root = str(self.world.root)
        for rank in range(2):
            tell(root, rank, 0)
        return [
            rank.loop.remote(self.world.name, total, root, self.options, stall, rollout_s) for rank in self.world.ranks
        ]

    def let(self, step: int) -> None:
        """The ranks may train up to `step`, a multiple of 5."""
        for upto in range(5, step + 1, 5):
            (self.world.root / f"upto-{upto}.go").touch()

    def told(self, rank: int) -> int:
        """The last step that a rank ended."""
        with contextlib.suppress(FileNotFoundError):
            return int((self.world.root / f"told-{rank}").read_text())
        return 0

    def kill_ranks(self) -> None:
        for pid in self.pids:
            kill(pid)

    def at(self, step: int) -> None:
        """Waits until both ranks have ended `step`."""
        until(lambda: min(self.told(0), self.told(1)) >= step, f"both ranks ended step {step}")

    def connect(self) -> Any:
        """The run as another job sees it."""
        self.world.run = lastgood.connect(self.world.name)
        return self.world.run

    def uninterrupted(self, total: int) -> list[str]:
        """Final digests of the same job without lastgood."""
        self.world.new_ranks()
        for _ in range(total):
            ray.get([rank.train.remote() for rank in self.world.ranks])
        return self.world.digests()


def manifests(world: World) -> dict[int, Manifest]:
    """Step -> manifest of what is whole in the store, whether a coordinator lives or not."""
    found = sorted((world.store / world.name).glob("global_step_*/*/COMPLETED"))
    places = [path.parent for path in found]
    told = [Manifest.from_bytes((place / "manifest.json").read_bytes(), where=str(place)) for place in places]
    return {manifest.step: manifest for manifest in sorted(told, key=lambda manifest: manifest.step)}


@pytest.mark.parametrize("snapshot", ["blocking", "overlapped"])
def test_both_ranks_are_killed_in_mid_run_and_new_ones_end_as_if_nothing_had_happened(
    world: World, snapshot: str
) -> None:
    led = Led(world, save_freq=4, snapshot=snapshot)
    digests = led.uninterrupted(15)
    results = led.start(15)
    led.let(10)
    led.at(10)
    led.connect()
    world.durable(8)
    led.kill_ranks()
    with pytest.raises(ray.exceptions.RayError):
        ray.get(results)
    led.let(15)
    told = ray.get(led.start(15, seed=99), timeout=LIMIT_S)
    assert [each["restored"] for each in told] == [8, 8]
    assert [each["saved"] for each in told] == [[12], [12]]
    assert [each["failures"] for each in told] == [[], []]
    assert [each["digest"] for each in told] == digests
    whole = manifests(world)
    assert list(whole) == [4, 8, 12, 15]  # 15 by close()
    assert "loss" in whole[12].metrics
    assert {member.updates for member in whole[12].members} == {12}
    assert whole[12].parent is not None
    assert whole[12].parent.step == 8
    until(lambda: not list(Path("/dev/shm").glob(f"lastgood.*.{world.name}.*")), "the run has left shared memory")


def test_a_request_from_another_job_is_cut_at_one_step_on_both_ranks(world: World) -> None:
    led = Led(world)
    results = led.start(60, rollout_s=0.05)
    led.let(10)
    led.at(10)
    run = led.connect()
    granted = run.status()["member_led"]["granted"]
    save = run.save(tag="by_another_job")
    assert save.outcome.waits_for  # the ranks have gone on since the window that the coordinator knew
    led.let(60)
    outcome = save.wait("committed")
    assert outcome.step is not None
    assert outcome.step > granted
    checkpoint = run.latest()
    assert (checkpoint.step, checkpoint.tag) == (outcome.step, "by_another_job")
    told = ray.get(results, timeout=LIMIT_S)
    assert [each["saved"] for each in told] == [[outcome.step]] * 2
    assert [each["failures"] for each in told] == [[], []]
    whole = manifests(world)
    assert list(whole) == [outcome.step, 60]
    assert {member.updates for member in whole[outcome.step].members} == {outcome.step}


def test_the_coordinator_is_killed_in_mid_run_and_the_loop_goes_on(world: World) -> None:
    led = Led(world, save_freq=10)
    results = led.start(30)
    led.let(15)
    led.at(10)
    led.connect()
    world.committed(10)
    epoch = world.hello()["epoch"]
    led.at(15)
    world.kill_coordinator()
    led.let(30)
    until(lambda: (20, epoch + 1) in {(c.step, c.epoch) for c in world.run.checkpoints() if c.committed}, "20 commits")
    told = ray.get(results, timeout=LIMIT_S)
    assert [each["saved"] for each in told] == [[10, 20, 30]] * 2
    assert [each["failures"] for each in told] == [[], []]
    assert {step: manifest.epoch for step, manifest in manifests(world).items()} == {
        10: epoch,
        20: epoch + 1,
        30: epoch + 1,
    }


def test_the_coordinator_is_killed_in_the_middle_of_a_cut_and_the_step_is_saved_once(world: World) -> None:
    led = Led(world, save_freq=10)
    world.arm("coordinator.snapshot", "kill")
    results = led.start(12)
    led.let(15)
    world.fired("coordinator.snapshot")
    told = ray.get(results, timeout=LIMIT_S)
    assert [each["saved"] for each in told] == [[10]] * 2
    assert {step: manifest.epoch for step, manifest in manifests(world).items()} == {10: 2, 12: 2}


def test_a_rank_that_stalls_costs_one_attempt_by_the_deadline_and_is_named(world: World) -> None:
    led = Led(world, save_freq=3, snapshot_deadline_s=2.0)
    results = led.start(9, stall=6)
    led.let(10)
    until(lambda: led.told(0) == 6, "rank 0 was let go on after the deadline")
    assert led.told(1) == 5
    run = led.connect()
    assert run.status()["member_led"]["absent"] == ["actor:1"]
    (world.root / "stall.go").touch()
    told = ray.get(results, timeout=LIMIT_S)
    assert [each["saved"] for each in told] == [[3, 9]] * 2
    blame = told[0]["failures"][0]
    assert len(told[0]["failures"]) == 1
    for words in ("step 6", "actor:1", "node", "last step reported: ", "snapshot_deadline_s"):
        assert words in blame, blame
    assert list(manifests(world)) == [3, 9]


def test_ranks_that_do_not_fit_together_are_told_who(world: World) -> None:
    led = Led(world, register_deadline_s=3.0)
    world.new_ranks()
    name, options = world.name, led.options

    def join(rank: int, world_size: int = 2, **more: Any) -> Any:
        def run(worker: Rank) -> str:
            try:
                lastgood.member(
                    name,
                    role="actor",
                    rank=rank,
                    world_size=world_size,
                    state=rank_state(worker),
                    **{**options, **more},
                )
            except lastgood.errors.LastgoodError as error:
                return f"{type(error).__name__}: {error}"
            return "joined"

        return run

    first, second = world.ranks
    assert "actor:1, which did not join" in ray.get(first.__ray_call__.remote(join(0)))
    doubled = ray.get([first.__ray_call__.remote(join(0)), second.__ray_call__.remote(join(0))])
    for told in doubled:
        assert "two live processes say that they are actor:0" in told
        assert told.count("pid ") == 2
    other = ray.get(first.__ray_call__.remote(join(0, save_freq=7)))
    assert "OptionsError" in other
    assert "save_freq is 7 here and 100 there" in other
    assert ray.get([first.__ray_call__.remote(join(0)), second.__ray_call__.remote(join(1))]) == ["joined"] * 2
    with pytest.raises(lastgood.errors.UsageError, match="led by its members"):
        world.attach(**{key: value for key, value in options.items() if key not in ("store", "staging")})


def train_loop(config: dict[str, Any]) -> None:
    """What TorchTrainer runs in each worker."""
    import ray.train
    import ray.train.torch
    import torch

    context = ray.train.get_context()
    rank, root = context.get_world_rank(), Path(config["root"])
    torch.manual_seed(7)
    model = ray.train.torch.prepare_model(torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.Linear(32, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    member = lastgood.member(
        config["name"],
        role="trainer",
        rank=rank,
        world_size=context.get_world_size(),
        state={"model": model, "optimizer": optimizer, "rng": lastgood.RNG()},
        **config["options"],
    )
    reported = ray.train.get_checkpoint()
    restored = member.resume("auto" if reported is None else reported)
    trained: list[int] = []
    for step in range(member.next_step, config["total"] + 1):
        loss = model(torch.randn(8, 13)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.append(step)
        if step == config["die_at"] and rank == 1:
            with contextlib.suppress(FileNotFoundError):
                (root / "die").rename(root / "died")
                os.kill(os.getpid(), signal.SIGKILL)
        member.end_step(step, metrics={"loss": float(loss.detach())})
        if step == 5 and rank == 0:  # a save is told to Ray Train once it is durable
            while (found := member.train_checkpoint()) is None:
                time.sleep(0.01)
            ray.train.report({"step": step}, checkpoint=found)
        elif step == 5:
            ray.train.report({"step": step})
        if step == 5:
            ray.train.get_all_reported_checkpoints()  # waits until Ray Train has taken it in
    member.close()
    weights = [value.tolist() for value in model.state_dict().values()]
    told = {
        "restored": restored and restored.step,
        "named": reported is not None,
        "trained": trained,
        "weights": weights,
        "rng": torch.rand(3).tolist(),
    }
    (root / f"result-{rank}.json").write_text(json.dumps(told))


def test_ray_train_restarts_its_workers_and_they_resume_where_the_last_checkpoint_is(world: World) -> None:
    import ray.train
    import ray.train.torch

    def fit(name: str, die: bool) -> list[dict[str, Any]]:
        root = world.root / name
        root.mkdir()
        if die:
            (root / "die").touch()
        options = {**Led(world, save_freq=4).options, "store": str(root / "store")}
        (root / "store").mkdir()
        config = {"name": f"{world.name}-{name}", "root": str(root), "total": 10, "die_at": 7, "options": options}
        trainer = ray.train.torch.TorchTrainer(
            train_loop,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
            run_config=ray.train.RunConfig(
                name=name,
                storage_path=str(root / "ray"),
                failure_config=ray.train.FailureConfig(max_failures=1),
            ),
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        )
        trainer.fit()
        assert (root / "died").exists() == die
        return [json.loads((root / f"result-{rank}.json").read_text()) for rank in range(2)]

    whole = fit("undisturbed", die=False)
    assert [told["restored"] for told in whole] == [None, None]
    killed = fit("killed", die=True)
    assert [(told["restored"], told["named"]) for told in killed] == [(4, True)] * 2
    assert [told["trained"] for told in killed] == [list(range(5, 11))] * 2
    for key in ("weights", "rng"):
        assert [told[key] for told in killed] == [told[key] for told in whole]
