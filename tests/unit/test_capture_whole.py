"""State that is easily left out or brought back as something else: it is kept, or refused when it is declared."""

from __future__ import annotations

import collections
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data import RandomSampler as TorchRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdata_sampler

from lastgood.storage.errors import SnapshotError, UsageError, WindowClosedError
from lastgood.workers import load
from lastgood.workers.member import Member
from lastgood.workers.rng_state import RNG
from lastgood.workers.small_state import Value
from tests.unit.checkpoints import checkpoint, locate_in, manifest_of, save

NUMBERS: Any = list(range(20))


def restore(folder: Path, manifest: Any, member: Member) -> None:
    load.prepare(member, manifest, locate_in(folder)).apply()


def carried(folder: Path, saved: Any, live: Any) -> Any:
    """`live` after it was restored from a checkpoint of `saved`."""
    manifest = checkpoint(folder, Member.of("trainer", 0, 1, {"state": saved}))
    restore(folder, manifest, Member.of("trainer", 0, 1, {"state": live}))
    return live


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


# -- silently wrong


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: TorchRandomSampler(NUMBERS),
        lambda: TorchRandomSampler(NUMBERS, generator=generator()),
        lambda: WeightedRandomSampler(torch.ones(20).tolist(), 20),
        lambda: SubsetRandomSampler(NUMBERS),
    ],
)
def test_a_sampler_whose_order_no_state_keeps_is_refused(sampler: Any) -> None:
    with pytest.raises(UsageError, match=r"trainer\.dataloader: its torch\.utils\.data\.sampler\.\w+ draws an order"):
        Member.of("trainer", 0, 1, {"dataloader": StatefulDataLoader(NUMBERS, batch_size=3, sampler=sampler())})
    batches = BatchSampler(sampler(), 3, False)
    with pytest.raises(UsageError, match="draws an order that no state_dict keeps"):
        Member.of("trainer", 0, 1, {"dataloader": StatefulDataLoader(NUMBERS, batch_sampler=batches)})


def test_torchdatas_sampler_under_torchs_batch_sampler_is_refused_and_under_its_own_is_not() -> None:
    inner = torchdata_sampler.RandomSampler(NUMBERS, generator=generator())
    loader = StatefulDataLoader(NUMBERS, batch_sampler=BatchSampler(inner, 3, False))
    with pytest.raises(UsageError, match="draws an order"):
        Member.of("trainer", 0, 1, {"dataloader": loader})
    for kept in (
        StatefulDataLoader(NUMBERS, batch_sampler=torchdata_sampler.BatchSampler(inner, 3, False)),
        StatefulDataLoader(NUMBERS, batch_size=3, sampler=inner),
        StatefulDataLoader(NUMBERS, batch_size=None, sampler=inner),
        StatefulDataLoader(NUMBERS, batch_size=3),
    ):
        Member.of("trainer", 0, 1, {"dataloader": kept})


def test_an_optimizer_with_state_of_its_own_is_refused_unless_it_says_it_has_none() -> None:
    class Counting(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "count": 3}

    model = nn.Linear(2, 2)
    optimizer: Any = Counting(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"actor\.optimizer: Counting overrides state_dict\(\)"):
        Member.of("actor", 0, 1, {"model": model, "optimizer": optimizer})
    optimizer.lastgood_plain = True
    Member.of("actor", 0, 1, {"model": model, "optimizer": optimizer})


def test_the_moments_of_a_zero_redundancy_optimizer_are_not_lost_silently() -> None:
    dist: Any = torch.distributed
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        with pytest.raises(UsageError, match="declare the optimizer that it wraps"):
            Member.of("actor", 0, 1, {"model": model, "optimizer": optimizer})
        member = Member.of("actor", 0, 1, {"model": model, "optimizer": optimizer.optim})
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        member.mark(1)
        assert set(member.capture(1)["optimizer"]["state"]["weight"]) == {"step", "exp_avg", "exp_avg_sq"}
        assert member.updates == 1
    finally:
        dist.destroy_process_group()


def test_random_streams_come_back_after_all_members_of_the_process(tmp_path: Path) -> None:
    def members() -> list[Member]:
        drawing = Value(lambda: 0, lambda _: torch.rand(3))  # as one that builds a module would
        return [Member.of("actor", 0, 1, {"rng": RNG()}), Member.of("rollout", 0, 1, {"engine": drawing})]

    saved = members()
    for member in saved:
        member.mark(1)
    shards = [record for member in saved for record in save(tmp_path, member, 1)]
    manifest = manifest_of(1, saved, shards)
    expected = torch.rand(2).tolist()
    load.apply_all([load.prepare(member, manifest, locate_in(tmp_path)) for member in members()])
    assert torch.rand(2).tolist() == expected


@pytest.mark.parametrize("kind", ["PCG64", "MT19937", "Philox"])
def test_a_numpy_generator_spawns_the_children_of_an_uninterrupted_run(kind: str, tmp_path: Path) -> None:
    def make(seed: int | None) -> np.random.Generator:
        return np.random.Generator(getattr(np.random, kind)(seed))

    own = make(1)
    own.spawn(2)
    own.random(3)
    manifest = checkpoint(tmp_path, Member.of("trainer", 0, 1, {"rng": RNG(own=own)}))
    expected = [own.random(), own.spawn(1)[0].random()]
    for seed in (1, None):
        fresh = make(seed)
        restore(tmp_path, manifest, Member.of("trainer", 0, 1, {"rng": RNG(own=fresh)}))
        assert [fresh.random(), fresh.spawn(1)[0].random()] == expected


def test_what_a_dict_holds_is_restored_in_place_too(tmp_path: Path) -> None:
    def make(number: float) -> tuple[Any, ...]:
        inner, tensor, array = {"n": number}, torch.full((2,), number), np.full(2, number)
        alpha = nn.Parameter(torch.full((1,), number))
        return inner, tensor, array, alpha, {"data": inner, "pair": (tensor, [array]), "log_alpha": alpha}

    inner, tensor, array, alpha, live = make(0.0)  # as a worker that gives a fresh dict of its own objects
    carried(tmp_path, make(5.0)[-1], live)
    assert inner == {"n": 5.0}
    assert tensor.tolist() == array.tolist() == [5.0, 5.0]
    assert alpha.item() == 5.0
    assert alpha.requires_grad
    assert live["data"] is inner
    assert live["pair"][0] is tensor
    assert live["log_alpha"] is alpha


def test_live_objects_that_do_not_fit_are_replaced_and_never_written_twice(tmp_path: Path) -> None:
    shared = torch.zeros(2)
    live = {"a": shared, "b": shared, "c": torch.zeros(3), "row": shared[:1]}
    saved = {"a": torch.ones(2), "b": torch.full((2,), 2.0), "c": torch.ones(2), "row": torch.full((1,), 7.0)}
    carried(tmp_path, saved, live)
    assert {key: value.tolist() for key, value in live.items()} == {"a": [1, 1], "b": [2, 2], "c": [1, 1], "row": [7]}
    assert shared.tolist() == [1, 1]
    tied = torch.ones(2)
    apart: dict[str, Any] = carried(tmp_path, {"a": tied, "b": tied}, {"a": torch.zeros(2), "b": torch.zeros(2)})
    assert apart["a"] is apart["b"]


def test_views_of_one_memory_come_back_as_views_of_one_memory(tmp_path: Path) -> None:
    buffer, array = torch.arange(6.0).reshape(2, 3), np.zeros(2)
    saved = {"buffer": buffer, "row": buffer[1], "same": buffer.detach(), "one": array, "two": array}
    back = carried(tmp_path, saved, {})
    back["buffer"].add_(1)
    assert back["row"].tolist() == [4, 5, 6]
    assert torch.equal(back["same"], back["buffer"])
    assert back["one"] is back["two"]
    assert buffer[1].tolist() == [3, 4, 5]


class Extra(nn.Module):
    """Gives a tensor, or tensors in a dict, as extra state."""

    def __init__(self, nested: bool, number: float) -> None:
        super().__init__()
        self.nested = nested
        self.amax = torch.full((3,), number)

    def get_extra_state(self) -> Any:
        return {"amax": [self.amax]} if self.nested else self.amax

    def set_extra_state(self, state: Any) -> None:
        self.amax = state["amax"][0] if self.nested else state


@pytest.mark.parametrize("nested", [True, False])
def test_tensors_in_extra_state_come_back_as_tensors(nested: bool, tmp_path: Path) -> None:
    back = carried(tmp_path, nn.Sequential(Extra(nested, 2.0)), nn.Sequential(Extra(nested, 0.0)))
    assert type(back[0].amax) is torch.Tensor
    assert back[0].amax.tolist() == [2, 2, 2]


def test_a_module_that_keeps_state_where_capture_does_not_look_is_refused() -> None:
    class Counter(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "count"] = torch.tensor(3)

    with pytest.raises(UsageError, match=r"actor\.model: 0 \(Counter\) overrides _save_to_state_dict and keeps count"):
        Member.of("actor", 0, 1, {"model": nn.Sequential(Counter(1, 1))})


# -- refused without need


def test_a_module_under_two_names_with_a_scalar_buffer_loads(tmp_path: Path) -> None:
    def make() -> nn.Module:
        encoder = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))  # num_batches_tracked has no dimension
        return nn.ModuleDict({"actor": encoder, "critic": encoder})

    carried(tmp_path, make(), make())


@pytest.mark.parametrize(
    "make", [collections.OrderedDict, lambda **items: collections.defaultdict(int, **items), collections.Counter]
)
def test_dicts_of_other_classes_keep_their_class(make: Any, tmp_path: Path) -> None:
    live = make(a=0)
    back = carried(tmp_path, make(a=1, b=2), live)
    assert back is live
    assert back == make(a=1, b=2)


@pytest.mark.parametrize("dtype", ["uint3", "int4"])
@pytest.mark.parametrize("where", ["parameter", "buffer", "dict"])
def test_dtypes_without_a_copy_kernel_come_back(dtype: str, where: str, tmp_path: Path) -> None:
    def make(number: int) -> Any:
        tensor = torch.full((4,), number, dtype=torch.uint8).view(getattr(torch, dtype))
        module = nn.Module()
        if where == "parameter":
            module.kept = nn.Parameter(tensor, requires_grad=False)
        elif where == "buffer":
            module.register_buffer("kept", tensor)
        return {"kept": tensor} if where == "dict" else module

    back = carried(tmp_path, make(3), make(0))
    kept = back["kept"] if where == "dict" else back.kept
    assert kept.view(torch.uint8).tolist() == [3, 3, 3, 3]


# -- the window


def weights_and(optimizers: dict[str, Any], model: Any) -> Member:
    model.weight.grad = torch.ones_like(model.weight)
    member = Member.of("actor", 0, 1, {"model": model, **optimizers})
    member.mark(1)
    return member


def test_an_optimizer_that_was_not_declared_closes_the_window_too() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    member = weights_and({}, model)  # weights only, as of a critic
    optimizer.step()
    with pytest.raises(WindowClosedError), member.gate.copying(1):
        member.capture(1)
    member.mark(2)
    member.capture(2)
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()  # of something else
    member.capture(2)
    member.close()
    optimizer.step()
    assert member.gate.open_step == 2


def test_an_optimizer_that_took_the_place_of_a_declared_one_is_found() -> None:
    model = nn.Linear(1, 1, bias=False)
    member = weights_and({"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, model)
    torch.optim.Adam(model.parameters(), lr=0.5).step()
    member.mark(2)
    with pytest.raises(SnapshotError, match=r"an optimizer that is not in its state \(Adam\) has updated its weights"):
        member.capture(2)


def test_a_users_hook_that_writes_weights_waits_for_a_copy_as_well() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: [model.weight.data.zero_(), None][1])
    member = weights_and({"optimizer": optimizer}, model)
    before = model.weight.item()
    with member.gate.copying(1):
        captured = member.capture(1)["model"]["weight"]
        update = threading.Thread(target=optimizer.step, daemon=True)
        update.start()
        update.join(0.3)
        assert captured.item() == before
    update.join()
    assert captured.item() != before


def test_a_member_that_is_gone_is_not_kept_by_the_hooks() -> None:
    member = Member.of("actor", 0, 1, {"model": nn.Linear(1, 1)})
    gone = weakref.ref(member)
    del member
    gc.collect()
    assert gone() is None


def test_closing_a_member_does_not_break_a_step_that_waits_for_a_copy() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    member = weights_and({"optimizer": optimizer}, model)
    optimizer.register_step_pre_hook(lambda *_: None)  # one of the user's, after ours
    failed: list[RuntimeError] = []

    def update() -> None:
        try:
            optimizer.step()
        except RuntimeError as error:  # OrderedDict mutated during iteration
            failed.append(error)

    with member.gate.copying(1):
        waiting = threading.Thread(target=update, daemon=True)
        waiting.start()
        waiting.join(0.3)
        member.close()  # as when its driver ends, or its actor is added again
    waiting.join()
    assert not failed
    optimizer.step()
