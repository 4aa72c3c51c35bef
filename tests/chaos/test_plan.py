"""Plans and reports of the campaign: pure."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.chaos.journal import Journal, Reader
from tests.chaos.plan import KINDS, PHASES, SAID, VICTIMS, draw
from tests.chaos.report import ORDER, read, summary, table

ROOT = Path(__file__).parents[2]


def test_every_failpoint_in_the_code_is_known_to_the_campaign_and_none_is_made_up() -> None:
    text = "".join(
        path.read_text() for folder in ("storage", "coordinator", "workers") for path in (ROOT / folder).glob("*.py")
    )
    named = set(re.findall(r'(?:failpoint\(\s*|failpoint, |pass_point\()"([a-z_.]+)"', text))
    from lastgood.coordinator import commands as cmd
    from lastgood.coordinator.runner import point
    from lastgood.workers.orders import OrderKind

    commands = {point(object.__new__(kind)) for kind in _leaves(cmd.AttemptCommand)}
    members = {f"member.{kind.value}" for kind in OrderKind}
    records = {f"stager.record.{state}" for state in ("accept", "refuse")}
    assert set(PHASES) <= named | commands | members | records
    # What a trial cannot meet: updates that go through no optimizer, members that lead, an order that is none.
    unmet = {"member.close_window", "member.grant", "member.nothing"}
    assert (named | commands | members | records) - set(PHASES) == unmet


def _leaves(kind: type) -> list[type]:
    below = [each for each in kind.__subclasses__() if each.__name__ != "NodeCommand" or each.__subclasses__()]
    return [leaf for each in below for leaf in _leaves(each)] if below else [kind]


def test_a_plan_comes_from_seed_and_number_alone_and_in_time_every_victim_is_broken_in_every_way() -> None:
    plans = [draw(1, number, slots=2, cuttable=True) for number in range(2000)]
    assert plans == [draw(1, number, slots=2, cuttable=True) for number in range(2000)]
    assert plans != [draw(2, number, slots=2, cuttable=True) for number in range(2000)]
    faults = [fault for plan in plans for fault in plan.faults]
    assert {fault.victim for fault in faults} == set(VICTIMS) == set(SAID)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.moment.point for fault in faults} - {None} == set(PHASES)
    assert {plan.in_memory for plan in plans} == {True, False}
    rescued = {("driver", "coordinator"), ("member", "coordinator"), ("member", "services")}
    assert rescued <= {tuple(f.victim for f in plan.faults) for plan in plans if plan.in_memory}
    assert all(fault.target in (1,) for fault in faults if fault.victim in ("raylet", "node"))


def test_where_nothing_can_be_cut_no_plan_cuts_or_takes_a_whole_node() -> None:
    faults = [f for n in range(500) for f in draw(1, n, slots=2, cuttable=False).faults]
    assert faults
    assert not any(fault.kind == "cut" or fault.victim == "node" for fault in faults)


def test_reports_of_several_files_are_summed_and_a_trial_that_was_run_again_counts_once(tmp_path: Path) -> None:
    def record(trial: int, *, ok: bool, fired: bool) -> str:
        fault = {"victim": "stager", "kind": "kill", "phase": "stage", "fired": fired}
        facts = {"seed": 3, "trial": trial, "ok": ok, "why": None if ok else "lost", "faults": [fault]}
        return json.dumps({**facts, "took_s": 6.0, "commits": 4, "lives": 1})

    (tmp_path / "a").write_text(f"{record(0, ok=True, fired=True)}\n{record(1, ok=False, fired=True)}\n")
    (tmp_path / "b").write_text(f"{record(1, ok=True, fired=True)}\n{record(2, ok=True, fired=False)}\n")
    records = read([tmp_path / "a", tmp_path / "b"])
    assert "3 trials (seeds 3), 3 without a fault found; 2 faults fired (1 more" in summary(records)
    assert "| a stager | SIGKILL | 2 | 2 |" in table(records)
    assert "trial 1 failed: lost" in summary(read([tmp_path / "a"]))


def test_every_phase_has_its_column() -> None:
    assert set(PHASES.values()) | {"start", "resume", "update", "close"} == set(ORDER)


def test_a_journal_is_read_by_whole_lines_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader = Reader(path)
    assert reader.news() == []
    Journal(path).tell("born", step=1)
    with path.open("a") as file:
        file.write('{"event": "half')
        file.flush()
        assert [entry["event"] for entry in reader.news()] == ["born"]
        file.write('way"}\n')
    assert [entry["event"] for entry in reader.news()] == ["halfway"]
    assert len(reader.entries) == 2
