"""What is told of a save afterwards, and the alarm for weights that stand still."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lastgood.client.leading import heed
from lastgood.client.output import JsonOutput, TextOutput
from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.messages import MemberId, RoleDeclaration
from lastgood.coordinator.options import Options
from lastgood.coordinator.outcomes import StepOutcome
from lastgood.coordinator.protocol import IllegalMoveError
from lastgood.coordinator.report import report
from lastgood.coordinator.story import Story, stories
from lastgood.coordinator.telling import Telling
from lastgood.storage.manifest import ShardRecord
from lastgood.workers.member import Member
from tests.unit.memory_world import Scene, run, shard
from tests.unit.protocol_bench import ACTOR1, COMPONENTS, HOSTS, Bench


def utc(when_s: float) -> str:
    return f"at {when_s:.1f} s"


def told(bench: Bench, step: int) -> tuple[Story, ...]:
    return stories(bench.core, [], step, utc)


def test_a_story_tells_who_asked_what_each_member_gave_and_when_it_moved() -> None:
    bench = Bench()
    bench.open(4)
    bench.ask("me", tag="now")
    bench.until(cmd.Stage)
    (story,) = told(bench, 4)
    assert (story.state, story.kind, story.tag, story.requested_by) == ("staging", "manual", "now", "me")
    assert [(part.member, part.node, part.updates) for part in story.members] == [
        ("actor:0", "n1", 4),
        ("trainer:0", "n1", 4),
        ("actor:1", "n2", 4),
    ]
    assert report(bench.core)["foreground"]["bytes"].keys() == {"actor:0", "actor:1", "trainer:0"}
    bench.now_s += 3
    bench.to_the_end()
    (story,) = told(bench, 4)
    assert story.state == "durable"
    moves = [sentence.partition(":")[0] for _, sentence in story.events if "->" in sentence]
    assert moves == [
        "requested -> snapshotting",
        "snapshotting -> staging",
        "staging -> accepting",
        "accepting -> committed",
        "committed -> uploading",
        "uploading -> durable",
    ]
    assert story.events[-1][0] == "at 3.0 s"


def test_every_attempt_at_a_step_is_told_oldest_first_with_its_blame() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.feed(ev.SnapshotFailed(bench.attempt.id, "n2", "the device fell off", ACTOR1))
    bench.to_the_end()
    bench.ask("again")
    bench.to_the_end()
    first, second = told(bench, 4)
    assert first.state == "aborted" and first.blame is not None and "the device fell off" in first.blame
    assert second.state == "durable" and second.blame is None
    assert told(bench, 5) == ()


def test_both_outputs_tell_it(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench()
    bench.open(4)
    bench.ask("me", tag="now")
    bench.to_the_end()
    TextOutput().told("qwen", 4, told(bench, 4))
    text = capsys.readouterr().out
    assert "(manual, tag now): durable" in text and "accepting -> committed" in text
    TextOutput().told("qwen", 5, ())
    assert "nothing is known of a save of step 5 of run qwen" in capsys.readouterr().out
    JsonOutput().told("qwen", 4, told(bench, 4))
    assert '"state": "durable"' in capsys.readouterr().out


# ---- the alarm


class Weights(Bench):
    """A bench whose members' weights have the digests that are set."""

    weights: str = "a"  # a letter for every rank, or one for each

    def shards(self, node: str) -> tuple[ShardRecord, ...]:
        def one(member: MemberId, name: str) -> ShardRecord:
            record = shard(member, name, node)
            digest = self.weights[min(member.rank, len(self.weights) - 1)] * 64
            return record.model_copy(update={"digest": digest}) if name == "model" else record

        return tuple(one(m, name) for m in HOSTS[node] for name in COMPONENTS[m.role])

    def save(self, step: int, weights: str) -> list[str]:
        self.weights = weights
        said = len(self.said(cmd.Alarm))
        self.feed(ev.WindowClosed())
        self.open(step, due=True)
        self.to_the_end()
        return [alarm.sentence for alarm in self.said(cmd.Alarm)[said:]]


def test_weights_that_stand_still_over_optimizer_steps_raise_an_alarm() -> None:
    bench = Weights()
    assert bench.save(2, "a") == []
    (alarm,) = bench.save(5, "a")
    assert "role actor at step 5" in alarm and "of step 2" in alarm and "stepped 3 times" in alarm
    assert bench.save(6, "b") == [] and bench.save(7, "a") == []


def test_the_weights_of_one_rank_that_stand_still_are_noticed_when_they_have_moved_before() -> None:
    bench = Weights()
    assert bench.save(1, "aa") == [] and bench.save(2, "bb") == []
    (alarm,) = bench.save(3, "cb")
    assert "the weights model of actor:1 at step 3" in alarm and "of step 2" in alarm
    frozen = Weights()  # the shard of rank 1 holds nothing that is trained
    assert [frozen.save(step, weights) for step, weights in ((1, "aa"), (2, "ba"), (3, "ca"))] == [[], [], []]


def test_an_alarm_is_in_the_log_of_whoever_ended_the_step(caplog: pytest.LogCaptureFixture) -> None:
    outcome = StepOutcome(5, "every 5 steps", failures=("step 4: disk full",), alarms=("the weights stand still",))
    heed(outcome, Options(run="qwen", store="/nowhere/store", staging="/nowhere/staging"))
    assert caplog.messages == ["step 4: disk full", "the weights stand still"]


def test_a_defect_of_the_coordinator_is_told_at_the_end_of_the_next_step() -> None:
    async def scene() -> None:
        driver = await Scene().ready()
        driver.core.handle = lambda event, now_s: (_ for _ in ()).throw(IllegalMoveError("no move"))
        with pytest.raises(IllegalMoveError):
            driver.declare(RoleDeclaration("critic", 1, ("model",), "m2"))
        told = Telling(lambda: driver, lambda: (0, 0)).news(3)
        assert told is not None and told.alarms == ("a defect of lastgood: no move",)
        await driver.stop()

    run(scene())


def test_only_what_an_optimizer_changes_is_watched() -> None:
    torch.manual_seed(0)
    policy, reference = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(policy.parameters())
    member = Member.of("actor", 0, 1, {"policy": policy, "reference": reference, "optimizer": optimizer})
    assert member.weights == ("policy",)
    member.close()


@pytest.mark.parametrize("why", ["no step between", "restored", "no optimizer"])
def test_there_is_no_alarm_without_an_optimizer_step_between(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Weights()
    if why == "no optimizer":
        mark = bench.report

        def without(node: str, step: int, updates: int | None = None) -> Any:
            found = mark(node, step, updates)
            members = tuple(type(r)(r.member, r.step, None, r.components) for r in found.members)
            return type(found)(found.node, members)

        monkeypatch.setattr(bench, "report", without)
    assert bench.save(2, "a") == []
    if why == "restored":
        bench.feed(ev.Resumed(None))
    if why == "no step between":
        bench.ask("again", tag="again")
        bench.to_the_end()
        assert bench.said(cmd.Alarm) == []
    else:
        assert bench.save(3, "a") == []
