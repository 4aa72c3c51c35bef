"""What `lastgood status` says to people."""

from __future__ import annotations

from lastgood.client.status_text import sentences
from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.report import report
from tests.unit.protocol_bench import ACTOR1, Bench


def told(bench: Bench, **more: object) -> tuple[str, list[str]]:
    """All that is said, and what is said to be wrong."""
    found = sentences("qwen", {**report(bench.core), "store": "/mnt/ckpts", "newest": None, "roles": {}, **more})
    return "\n".join(sentence for sentence, _ in found), [sentence for sentence, good in found if not good]


def test_a_run_that_is_well_says_where_it_stands() -> None:
    bench = Bench()
    text, wrong = told(bench, roles={"actor": 2, "trainer": 1})
    assert "run qwen, epoch 5, store /mnt/ckpts" in text
    assert "nothing is committed yet" in text
    assert "members: 2 of actor, 1 of trainer, on 2 nodes" in text
    assert "only after the next end_step" in text
    assert not wrong


def test_a_save_under_way_and_one_that_waits_are_told() -> None:
    bench = Bench()
    bench.ask("r1", deadline_s=30)
    assert "waits: manual save" in told(bench)[0]
    bench.open(4, due=True)
    bench.until(cmd.Stage)
    text, wrong = told(bench, newest={"step": 3, "state": "durable", "attempt": "a5.0"})
    assert "newest checkpoint: step 3, durable (attempt a5.0)" in text
    assert "saving: step 4 is staging" in text
    assert "step 4 can be saved right now" in text
    assert not wrong


def test_what_is_wrong_is_marked() -> None:
    bench = Bench()
    bench.feed(ev.MemberDropped(ACTOR1, "SIGKILL"))
    bench.feed(ev.NodeLost("n2", "its raylet is gone"))
    text, wrong = told(bench, missing=["actor:1"], nodes_silent=["n2"])
    assert "missing: actor:1" in text
    assert [sentence for sentence in wrong if sentence == "not heard: node n2"]
    assert [sentence for sentence in wrong if "actor:1" in sentence]


def test_alarms_and_defects_are_told() -> None:
    _, wrong = told(Bench(), alarms=["the weights stand still"], faults=["IllegalMoveError: no move"])
    assert wrong == ["alarm: the weights stand still", "a defect of lastgood: IllegalMoveError: no move"]
