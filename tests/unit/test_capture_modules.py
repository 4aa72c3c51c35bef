"""Plain modules and optimizers: every kind of state comes back bit for bit, and what is empty stays empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastgood.storage.errors import FingerprintError, SnapshotError, UsageError
from lastgood.workers import load
from lastgood.workers.member import Member
from tests.unit.checkpoints import bits, checkpoint, locate_in, round_trip

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "adamw tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.01, max_iter=2),
}


class Training:
    """A module with tied weights, a frozen parameter and batch norm, and an optimizer."""

    def __init__(self, optimizer: str = "adamw", seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        self.model[2].weight = self.model[0].weight
        self.model.register_parameter("frozen", nn.Parameter(torch.rand(3), requires_grad=False))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.member = Member.of("actor", 0, 1, {"model": self.model, "optimizer": self.optimizer})

    def update(self, count: int = 1) -> None:
        for _ in range(count):

            def closure() -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = self.model(torch.linspace(0, 1, 32).reshape(8, 4) ** 2).pow(2).sum()
                loss.backward()
                return loss

            self.optimizer.step(closure)

    def bits(self) -> dict[str, Any]:
        """Everything of it, read without lastgood."""
        found: dict[str, Any] = {name: bits(tensor) for name, tensor in self.model.state_dict().items()}
        packed = self.optimizer.state_dict()
        for index, state in packed["state"].items():
            for key, value in state.items():
                found[f"{index}.{key}"] = bits(value) if isinstance(value, torch.Tensor) else repr(value)
        found["groups"] = repr(packed["param_groups"])
        return found


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("updates", [0, 3])
def test_updates_then_restore_then_updates_equal_an_uninterrupted_run(
    optimizer: str, updates: int, tmp_path: Path
) -> None:
    training = Training(optimizer)
    training.update(updates)
    manifest = checkpoint(tmp_path, training.member)
    at_save = training.bits()
    training.update(2)

    resumed = Training(optimizer, seed=2)
    load.prepare(resumed.member, manifest, locate_in(tmp_path)).apply()
    assert resumed.bits() == at_save
    assert resumed.member.updates == updates
    resumed.update(2)
    assert resumed.bits() == training.bits()


def test_capture_before_the_first_update_runs_no_step_and_records_empty_state() -> None:
    training = Training()
    training.member.mark(0)
    before = training.bits()
    captured = training.member.capture(0)["optimizer"]
    assert captured["state"] == {}
    assert captured["param_groups"][0]["params"] == ["frozen", "0.weight", "0.bias", "1.weight", "1.bias"]
    assert training.bits() == before
    assert not training.optimizer.state


def test_restoring_empty_state_clears_what_the_optimizer_has(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, Training().member)
    later = Training()
    later.update(2)
    load.prepare(later.member, manifest, locate_in(tmp_path)).apply()
    assert not later.optimizer.state
    assert later.member.updates == 0


def test_existing_moments_are_written_in_place(tmp_path: Path) -> None:
    training = Training()
    training.update()
    manifest = checkpoint(tmp_path, training.member)
    training.update()
    weight, moment = training.model[0].weight, training.optimizer.state[training.model[0].weight]["exp_avg"]
    load.prepare(training.member, manifest, locate_in(tmp_path)).apply()
    assert training.model[0].weight is weight
    assert training.optimizer.state[weight]["exp_avg"] is moment


def test_heavy_state_is_captured_live_and_tied_weights_stay_tied() -> None:
    training = Training()
    training.member.mark(0)
    captured = training.member.capture(0)["model"]
    assert captured["0.weight"].data_ptr() == training.model[0].weight.data_ptr()
    assert not captured["0.weight"].requires_grad
    back = round_trip(captured)
    assert back["0.weight"] is back["2.weight"]


def test_buffers_are_those_of_the_step_though_a_rollout_has_changed_them() -> None:
    training = Training()
    training.update()
    training.member.mark(1)
    at_mark = training.model[1].running_mean.clone()
    training.model(torch.ones(8, 4))
    captured = training.member.capture(1)["model"]
    assert not torch.equal(training.model[1].running_mean, at_mark)
    assert torch.equal(captured["1.running_mean"], at_mark)
    assert captured["1.num_batches_tracked"].item() == 1


def test_rates_are_those_of_the_step_though_they_were_changed_since() -> None:
    training = Training()
    training.member.mark(0)
    training.optimizer.param_groups[0]["lr"] = 5.0
    assert training.member.capture(0)["optimizer"]["param_groups"][0]["lr"] == 0.01


def test_untied_weights_do_not_load_into_tied_ones(tmp_path: Path) -> None:
    def build(tied: bool) -> Member:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        if tied:
            model[1].weight = model[0].weight
        return Member.of("actor", 0, 1, {"model": model})

    manifest = checkpoint(tmp_path, build(tied=False))
    names = ["actor.model.structure", "actor.model.parameters"]
    with pytest.raises(FingerprintError, match=r"actor\.model\.1\.weight was a tensor of its own, is tied to 0.weight"):
        load.prepare(build(tied=True), manifest, locate_in(tmp_path), None, names)


def test_a_changed_structure_names_every_key_and_touches_nothing(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    manifest = checkpoint(tmp_path, Member.of("actor", 0, 1, {"model": saved, "cursor": {"n": 1}}))
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2).double(), "d": nn.Linear(2, 2)})
    before = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    cursor = {"n": 2}
    member = Member.of("actor", 0, 1, {"model": model, "cursor": cursor})
    with pytest.raises(FingerprintError) as refused:
        load.prepare(member, manifest, locate_in(tmp_path), None, ["actor.model.parameters"])
    assert set(refused.value.changes) == {
        f"actor.model.{name}"
        for name in ("a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias", "d.weight", "d.bias")
    }
    for words in (
        "missing in the checkpoint: actor.model.d.bias, actor.model.d.weight",
        "unexpected in the checkpoint: actor.model.c.bias, actor.model.c.weight",
        "actor.model.a.weight was float32[2, 2], is float32[3, 2]",
        "actor.model.b.bias was float32[2], is float64[2]",
        "member actor:0",
        "Nothing was touched",
    ):
        assert words in str(refused.value)
    assert {name: bits(tensor) for name, tensor in model.state_dict().items()} == before
    assert cursor == {"n": 2}


def test_changed_parameter_groups_are_refused_by_name(tmp_path: Path) -> None:
    training = Training()
    manifest = checkpoint(tmp_path, training.member)
    other = Training()
    other.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(UsageError, match=r"parameter 0 of group 1"):
        load.prepare(other.member, manifest, locate_in(tmp_path))
    named = Training()
    named.optimizer.param_groups[0]["new_option"] = 1
    with pytest.raises(FingerprintError, match=r"missing in the checkpoint: actor.optimizer.param_groups.0.new_option"):
        load.prepare(named.member, manifest, locate_in(tmp_path))
    load.prepare(named.member, manifest, locate_in(tmp_path), None, ["actor.optimizer.param_groups"]).apply()
    assert named.optimizer.param_groups[0]["new_option"] == 1


def test_one_optimizer_over_two_modules_names_parameters_by_module(tmp_path: Path) -> None:
    actor, critic = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
    member = Member.of("worker", 0, 1, {"actor": actor, "critic": critic, "optimizer": optimizer})
    member.mark(0)
    names = member.capture(0)["optimizer"]["param_groups"][0]["params"]
    assert names == ["actor.weight", "actor.bias", "critic.weight", "critic.bias"]


def test_wrappers_do_not_change_names() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(plain, backend="eager")
    one = Member.of("actor", 0, 1, {"model": plain})
    other = Member.of("actor", 0, 1, {"model": compiled})
    assert list(other.survey()["model"]) == ["0.weight", "0.bias"]
    assert one.fingerprint() == other.fingerprint()


def test_extra_state_of_a_module_is_kept(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale: dict[str, Any] = {"amax": [1.0]}

        def get_extra_state(self) -> dict[str, Any]:
            return self.scale

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.scale = state

    model: Any = nn.Sequential(Scaled())
    member = Member.of("actor", 0, 1, {"model": model})
    manifest = checkpoint(tmp_path, member)
    model[0].scale["amax"].append(2.0)
    load.prepare(member, manifest, locate_in(tmp_path)).apply()
    assert model[0].scale == {"amax": [1.0]}


def test_a_module_without_values_cannot_be_saved() -> None:
    member = Member.of("actor", 0, 1, {"model": nn.Linear(2, 2, device="meta")})
    member.mark(0)
    with pytest.raises(SnapshotError, match=r"actor\.model\.weight is on the meta device"):
        member.capture(0)
