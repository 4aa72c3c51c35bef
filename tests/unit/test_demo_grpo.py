"""The demo's pure parts: GRPO's arithmetic against values worked out by hand, the task, the comparison."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from lastgood.client.demo import run_demo
from lastgood.client.demo.grpo import group_advantages, grpo_loss, kl_to_reference, response_mask, token_log_probs
from lastgood.client.demo.recipe import Recipe
from lastgood.client.demo.report import DemoReport, KillFact, SaveFact, compare
from lastgood.client.demo.task import END, PAD, SampleStream, Tokenizer, make_loader, reward
from lastgood.storage.errors import UsageError

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def test_advantages_are_relative_to_the_own_group():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 9.0])
    advantages = group_advantages(rewards, 4)
    # group 1: mean 0.5, deviation 0.5; group 2: mean 6, deviation sqrt(3)
    expected = [1.0, -1.0, -1.0, 1.0, *[-1 / math.sqrt(3)] * 3, 3 / math.sqrt(3)]
    assert torch.allclose(advantages, torch.tensor(expected), atol=1e-5)


def test_a_group_of_equal_rewards_teaches_nothing():
    assert group_advantages(torch.full((4,), 0.2), 4).tolist() == [0.0] * 4


def test_rewards_that_make_no_whole_groups_are_refused():
    with pytest.raises(ValueError, match="groups of 4"):
        group_advantages(torch.zeros(6), 4)


def test_the_mask_ends_with_the_end_mark():
    responses = torch.tensor([[5, END, PAD], [5, 6, 7], [END, PAD, PAD], [5, 6, END]])
    assert response_mask(responses, END).tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]


def test_log_probs_are_those_of_the_tempered_distribution():
    logits = torch.tensor([[[0.0, math.log(3.0)]]])
    assert token_log_probs(logits, torch.tensor([[1]]), 1.0).exp().item() == pytest.approx(0.75)
    assert token_log_probs(logits, torch.tensor([[1]]), 0.5).exp().item() == pytest.approx(0.9)  # 9 : 1


def test_kl_is_k3_and_never_negative():
    policy = torch.log(torch.tensor([0.5, 0.5, 0.5]))
    reference = torch.log(torch.tensor([0.5, 0.25, 1.0]))
    expected = [0.0, 0.5 - math.log(0.5) - 1, 2.0 - math.log(2.0) - 1]
    assert torch.allclose(kl_to_reference(policy, reference), torch.tensor(expected))
    assert min(expected) >= 0


def test_the_ratio_is_clipped_only_where_leaving_the_range_would_be_rewarded():
    ratios = torch.tensor([[2.0, 2.0], [0.5, 0.5]])
    old = torch.zeros(2, 2)
    loss = grpo_loss(
        torch.log(ratios),
        old,
        torch.log(ratios),
        torch.tensor([1.0, -1.0]),
        torch.ones(2, 2),
        kl_coefficient=0.0,
        **CLIP,
    )
    # advantage +1: min(2, 1.28) = 1.28 per token; advantage -1: min(-0.5, -0.8) = -0.8 per token
    assert loss.total.item() == pytest.approx(-(2 * 1.28 - 2 * 0.8) / 4)
    assert loss.clipped_fraction.item() == 1.0
    unclipped = grpo_loss(
        torch.log(ratios),
        old,
        torch.log(ratios),
        torch.tensor([-1.0, 1.0]),
        torch.ones(2, 2),
        kl_coefficient=0.0,
        **CLIP,
    )
    assert unclipped.total.item() == pytest.approx(-(2 * -2.0 + 2 * 0.5) / 4)
    assert unclipped.clipped_fraction.item() == 0.0


def test_on_policy_loss_has_the_plain_policy_gradient():
    log_probs = torch.log(torch.tensor([[0.3, 0.6]])).requires_grad_()
    fixed = log_probs.detach()
    loss = grpo_loss(log_probs, fixed, fixed, torch.tensor([2.0]), torch.ones(1, 2), kl_coefficient=0.5, **CLIP)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(-2.0)
    assert log_probs.grad is not None
    assert torch.allclose(log_probs.grad, torch.tensor([[-1.0, -1.0]]))  # -advantage / tokens; k3 is flat at 0


def test_masked_tokens_count_for_nothing():
    log_probs = torch.tensor([[0.0, 3.0]])
    zero = torch.zeros(1, 2)
    loss = grpo_loss(log_probs, zero, zero, torch.tensor([1.5]), torch.tensor([[1.0, 0.0]]), kl_coefficient=1.0, **CLIP)
    assert loss.total.item() == pytest.approx(-1.5)
    assert loss.kl.item() == 0.0


def test_kl_is_added_with_its_coefficient():
    policy, reference = torch.log(torch.tensor([[0.5]])), torch.log(torch.tensor([[0.25]]))
    loss = grpo_loss(policy, policy, reference, torch.zeros(1), torch.ones(1, 1), kl_coefficient=0.1, **CLIP)
    assert loss.total.item() == pytest.approx(0.1 * (0.5 - math.log(0.5) - 1))


@pytest.mark.parametrize(
    ("response", "earned"),
    [
        ("12</s>", 1.0),
        ("11</s>", 0.2 + 0.3 * 0.9),
        ("2</s><pad>", 0.2),  # 10 away
        ("99</s>", 0.2),
        ("12", 0.0),  # never ended
        ("</s><pad><pad>", 0.0),
        ("1+</s>", 0.0),
        ("<s>2</s>", 0.0),
        ("12</s>1", 0.0),
    ],
)
def test_reward_follows_the_rule(response: str, earned: float):
    assert reward(response, 12) == pytest.approx(earned)


def test_the_tokenizer_round_trips_every_character():
    tokenizer = Tokenizer()
    text = "0123456789+="
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.prompt(3, 9)) == "<s>3+9="
    assert tokenizer.decode([END, PAD]) == "</s><pad>"
    with pytest.raises(KeyError):
        tokenizer.encode("a")


@pytest.mark.parametrize("cut", [1, 9, 10, 11, 20])
def test_the_loader_continues_from_its_state_across_epochs(cut: int):
    def identities(stream: SampleStream, count: int) -> list[list[int]]:
        return [[sample.identity for sample in stream.take()] for _ in range(count)]

    whole = identities(SampleStream(make_loader(8, seed=3)), 32)
    loader = make_loader(8, seed=3)
    stream = SampleStream(loader)
    before = identities(stream, cut)
    state = loader.state_dict()
    identities(stream, 2)  # drawn after the save, then lost
    again = make_loader(8, seed=3)
    again.load_state_dict(state)
    assert before + identities(SampleStream(again), 32 - cut) == whole


def test_the_loader_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    SampleStream(make_loader(8, seed=3)).take()
    assert torch.equal(before, torch.get_rng_state())


def test_a_demo_too_short_for_its_kills_is_refused_with_the_number_it_needs():
    with pytest.raises(UsageError, match="at least 9 steps"):
        Recipe(steps=8, save_freq=3)
    assert Recipe(steps=10, save_freq=3).save_steps == (3, 6, 9)


def test_comparison_finds_changed_missing_and_shortened_values():
    left = {"parameters/a (rank 0)": "x", "parameters/b (rank 0)": "y", "losses": ["1", "2"], "scheduler (rank 0)": "s"}
    right = {"parameters/a (rank 0)": "x", "parameters/b (rank 0)": "z", "losses": ["1"], "optimizer/m (rank 1)": "m"}
    found = {c.what: (c.values, c.differences) for c in compare(left, right)}
    assert found == {
        "parameters": (2, ("parameters/b (rank 0)",)),
        "losses": (2, ("losses",)),
        "scheduler": (1, ("scheduler (rank 0)",)),
        "optimizer": (1, ("optimizer/m (rank 1)",)),
    }


def make_report(*, differing: bool = False, survived: bool = True) -> DemoReport:
    return DemoReport(
        steps=9,
        saves=[SaveFact(3, 0.012, 0.5), SaveFact(6, 0.02, None), SaveFact(9, 0.011, 0.25)],
        kills=[KillFact("training rank", 3, True, ""), KillFact("coordinator", 6, survived, "")],
        resumed_from=[3],
        compared=compare({"losses": ["a"]}, {"losses": ["b" if differing else "a"]}),
        rewards=[0.1, 0.2],
        parameters=10,
        seconds=1.0,
    )


def test_the_json_line_says_what_the_table_says():
    line = json.loads(make_report().to_json())
    assert line["exact"] is True
    assert line["passed"] is True
    assert line["kills_survived"] == 2
    assert line["saves"] == 2
    assert line["lost_steps"] == [6]
    assert line["stall_ms"] == [12.0, 20.0, 11.0]
    assert line["commit_s"] == [0.5, 0.25]
    assert line["resumed_from"] == [3]


def test_a_run_that_is_not_exact_or_lost_to_a_kill_does_not_pass():
    assert make_report().passed
    assert not make_report(differing=True).passed
    assert not make_report(survived=False).passed


def test_nothing_heavy_is_imported_before_the_demo_runs():
    heavy = "{'torch', 'ray', 'transformers', 'torchdata'}"
    code = f"import sys, lastgood.client.demo; raise SystemExit(sorted({heavy} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_missing_extra_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs transformers and torchdata.*pip install 'lastgood\[demo\]'"):
        run_demo(console=Console(stderr=True))
