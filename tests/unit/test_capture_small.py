"""Small state: every random stream, dataloaders in mid-epoch, schedulers, the user's dicts, lists and values."""

from __future__ import annotations

import collections
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from lastgood.storage.errors import EncodeError, FingerprintError
from lastgood.workers import load
from lastgood.workers.component import private_copy
from lastgood.workers.member import Member
from lastgood.workers.rng_state import RNG
from lastgood.workers.small_state import Value
from tests.unit.checkpoints import checkpoint, image_of, locate_in


def restore(folder: Path, manifest: Any, member: Member) -> None:
    load.prepare(member, manifest, locate_in(folder)).apply()


def draw(own: dict[str, Any]) -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(2).tolist(),
        np.random.standard_normal(),
        torch.rand(2).tolist(),
        torch.randn(3).tolist(),
        torch.rand(2, generator=own["sampler"]).tolist(),
        own["noise"].normal(size=2).tolist(),
        own["shuffle"].random(),
    ]


def streams() -> dict[str, Any]:
    return {
        "sampler": torch.Generator().manual_seed(5),
        "noise": np.random.default_rng(5),
        "shuffle": random.Random(5),
    }


def test_every_random_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    own = streams()
    draw(own)  # leaves half of a pair of normals in python's and numpy's streams
    member = Member.of("trainer", 0, 1, {"rng": RNG(**own)})
    manifest = checkpoint(tmp_path, member)
    expected = [draw(own) for _ in range(3)]
    fresh = streams()
    draw(fresh)
    draw(fresh)
    restore(tmp_path, manifest, Member.of("trainer", 0, 1, {"rng": RNG(**fresh)}))
    assert [draw(fresh) for _ in range(3)] == expected


def test_streams_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, Member.of("trainer", 0, 1, {"rng": RNG(**streams())}))
    now = {"sampler": np.random.default_rng(1), "noise": np.random.default_rng(1), "other": random.Random(1)}
    state = torch.get_rng_state()
    with pytest.raises(FingerprintError) as refused:
        restore(tmp_path, manifest, Member.of("trainer", 0, 1, {"rng": RNG(**now)}))
    assert refused.value.changes == {
        "trainer.rng.generators.other": (None, "present"),
        "trainer.rng.generators.shuffle": ("present", None),
        "trainer.rng.generators.sampler": ("torch cpu", "numpy PCG64"),
    }
    assert torch.equal(torch.get_rng_state(), state)


def make_loader(kind: str) -> Any:
    numbers: Any = list(range(20))
    if kind == "global stream":
        return StatefulDataLoader(numbers, batch_size=3, shuffle=True)
    if kind == "own generator":
        return StatefulDataLoader(numbers, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1))
    if kind == "sampler with generator":
        sampler = RandomSampler(numbers, generator=torch.Generator().manual_seed(2))
        return StatefulDataLoader(numbers, batch_size=3, sampler=sampler)
    return StatefulDataLoader(numbers, batch_size=3, shuffle=True, num_workers=1)


def take(loader: Any, iterator: Any, count: int) -> tuple[list[Any], Any]:
    """`count` batches, over the end of epochs, each with a draw of the global stream."""
    seen: list[Any] = []
    while len(seen) < count:
        iterator = iterator or iter(loader)
        try:
            batch = next(iterator)
        except StopIteration:
            iterator = None
            continue
        seen.append((batch.tolist(), torch.rand(1).item()))
    return seen, iterator


@pytest.mark.parametrize(
    ("kind", "taken"),  # taken: before the first batch, in mid-epoch, at the epoch's end, in the second epoch
    [
        *((kind, n) for kind in ("global stream", "own generator", "sampler with generator") for n in (0, 3, 7, 9)),
        ("worker process", 0),
        ("worker process", 3),
    ],
)
def test_a_dataloader_gives_the_batches_of_an_uninterrupted_run(kind: str, taken: int, tmp_path: Path) -> None:
    torch.manual_seed(3)
    loader = make_loader(kind)
    _, iterator = take(loader, None, taken)
    rest, _ = take(loader, iterator, 12)  # no capture anywhere

    torch.manual_seed(3)
    captured = make_loader(kind)
    member = Member.of("trainer", 0, 1, {"dataloader": captured, "rng": RNG()})
    member.mark(0)
    _, iterator = take(captured, None, taken)
    manifest = checkpoint(tmp_path, member)
    assert take(captured, iterator, 12)[0] == rest  # capture has changed nothing

    torch.manual_seed(99)
    resumed = make_loader(kind)
    restore(tmp_path, manifest, Member.of("trainer", 0, 1, {"dataloader": resumed, "rng": RNG()}))
    assert take(resumed, None, 12)[0] == rest


def test_a_changed_dataset_or_batch_size_is_refused_with_both_values(tmp_path: Path) -> None:
    def member(length: int, batch_size: int) -> Member:
        numbers: Any = list(range(length))
        return Member.of("trainer", 0, 1, {"dataloader": StatefulDataLoader(numbers, batch_size=batch_size)})

    manifest = checkpoint(tmp_path, member(20, 3))
    now = member(24, 4)
    with pytest.raises(FingerprintError, match=r"batch_size: saved 3, now 4.*dataset_length: saved 20, now 24"):
        load.prepare(now, manifest, locate_in(tmp_path))
    names = ["trainer.dataloader.batch_size", "trainer.dataloader.dataset_length"]
    load.prepare(now, manifest, locate_in(tmp_path), None, names)


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "multistep": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 5)], milestones=[3]
    ),
    "onecycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
    "warm": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
}


def make_scheduler(name: str, optimizer: Any) -> Any:
    return SCHEDULERS[name](optimizer)


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_a_scheduler_gives_the_rates_of_an_uninterrupted_run(name: str, tmp_path: Path) -> None:
    def build() -> tuple[Member, Any, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make_scheduler(name, optimizer)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return Member.of("actor", 0, 1, state), optimizer, scheduler

    def rates(optimizer: Any, scheduler: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    member, optimizer, scheduler = build()
    rates(optimizer, scheduler, 3)
    manifest = checkpoint(tmp_path, member)
    expected = rates(optimizer, scheduler, 6)
    resumed, optimizer, scheduler = build()
    restore(tmp_path, manifest, resumed)
    assert rates(optimizer, scheduler, 6) == expected
    if name == "multistep":
        assert isinstance(scheduler.milestones, collections.Counter)


def test_another_schedulers_state_is_refused_by_its_keys(tmp_path: Path) -> None:
    def member(name: str) -> Member:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Member.of("actor", 0, 1, {"scheduler": make_scheduler(name, optimizer)})

    manifest = checkpoint(tmp_path, member("multistep"))
    with pytest.raises(FingerprintError, match=r"saved 'MultiStepLR', now 'CosineAnnealingWarmRestarts'"):
        load.prepare(member("warm"), manifest, locate_in(tmp_path))
    with pytest.raises(FingerprintError, match=r"actor\.scheduler\.T_0.*actor\.scheduler\.milestones"):
        load.prepare(member("warm"), manifest, locate_in(tmp_path), None, ["actor.scheduler.class"])


def test_dicts_lists_and_values_are_restored_in_place(tmp_path: Path) -> None:
    cursor: dict[str, Any] = {"step": 3, "seen": [1, 2], "mean": torch.tensor([1.5])}
    history: list[Any] = [("a", 1.0), None]
    box = {"value": {"run_id": "abc", 7: b"x"}}
    state = {"cursor": cursor, "history": history, "wandb": Value(lambda: box["value"], lambda v: box.update(value=v))}
    member = Member.of("trainer", 0, 1, state)
    member.mark(1)
    cursor["seen"].append(3)  # after end_step: belongs to the next checkpoint
    history.clear()
    box["value"]["run_id"] = "changed"
    captured = member.capture(1)
    assert captured["cursor"]["seen"] == [1, 2]
    assert captured["history"] == [("a", 1.0), None]
    manifest = checkpoint(tmp_path, member)
    cursor.clear()
    history.append("later")
    box["value"] = {}
    restore(tmp_path, manifest, member)
    assert state["cursor"] is cursor
    assert cursor["seen"] == [1, 2, 3]
    assert torch.equal(cursor["mean"], torch.tensor([1.5]))
    assert history == []
    assert box["value"] == {"run_id": "changed", 7: b"x"}


def test_a_dict_where_a_list_was_is_refused(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, Member.of("trainer", 0, 1, {"cursor": {"n": 1}}))
    live = [1]
    with pytest.raises(FingerprintError, match="was dict, is list"):
        load.prepare(Member.of("trainer", 0, 1, {"cursor": live}), manifest, locate_in(tmp_path))
    assert live == [1]


def test_values_without_an_exact_form_are_named_by_their_path() -> None:
    member = Member.of("trainer", 0, 1, {"cursor": {"a": [1, {"seen": {1, 2}}]}})
    member.mark(1)
    with pytest.raises(EncodeError, match=r'\["a"\]\[1\]\["seen"\]'):
        image_of(member.capture(1)["cursor"])


def test_a_private_copy_shares_no_memory_and_keeps_ties() -> None:
    tensor, array = torch.ones(2), np.ones(2)
    copy = private_copy({"one": tensor, "two": [tensor], "array": array})
    tensor.zero_()
    array[:] = 0
    assert copy["one"] is copy["two"][0]
    assert copy["one"].tolist() == [1, 1]
    assert copy["array"].tolist() == [1, 1]
