"""A save whose deadline cannot be met is answered at once, by what the last saves took; never on a guess."""

from __future__ import annotations

import pytest

from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.messages import SaveState
from lastgood.coordinator.moves import Phase
from lastgood.coordinator.outcomes import COMMITTED_OR_BEYOND
from lastgood.coordinator.timings import ENOUGH, Timings
from tests.unit.protocol_bench import Bench

SECONDS = {cmd.Snapshot: 0.5, cmd.Stage: 4.0, cmd.Accept: 0.25, cmd.Publish: 0.25}  # a save takes 5 s in all


def save(bench: Bench, step: int) -> None:
    """A whole save in which every phase takes its time."""
    bench.open(step, due=True)
    for kind, seconds in SECONDS.items():
        bench.until(kind)
        bench.now_s += seconds
    bench.to_the_end()


def told(bench: Bench, request_id: str) -> cmd.Announce:
    return [announce for announce in bench.said(cmd.Announce) if request_id in announce.request_ids][-1]


def seasoned(saves: int = ENOUGH) -> Bench:
    bench = Bench()
    for step in range(1, saves + 1):
        save(bench, step)
    return bench


def test_a_deadline_that_cannot_be_met_is_answered_at_once_and_names_the_phase() -> None:
    bench = seasoned()
    started = len(bench.said(cmd.Snapshot))
    bench.ask("r", deadline_s=3)
    blame = told(bench, "r").blame
    assert told(bench, "r").state is SaveState.ABORTED and blame is not None
    assert "staging would be late" in str(blame) and "deadline of 6 s or more" in str(blame)
    assert len(bench.said(cmd.Snapshot)) == started and not bench.pending


def test_a_deadline_that_can_be_met_starts_the_save() -> None:
    bench = seasoned()
    bench.ask("r", deadline_s=6)
    bench.to_the_end()
    assert told(bench, "r").state in COMMITTED_OR_BEYOND


def test_nothing_is_turned_away_before_enough_saves_were_seen() -> None:
    bench = seasoned(ENOUGH - 1)
    bench.ask("r", deadline_s=3)
    bench.to_the_end()
    assert told(bench, "r").state in COMMITTED_OR_BEYOND


def test_a_request_without_a_deadline_of_its_own_is_never_turned_away() -> None:
    bench = seasoned()
    bench.ask("r")
    bench.to_the_end()
    assert told(bench, "r").state in COMMITTED_OR_BEYOND


def test_what_a_save_under_way_still_needs_is_counted_in() -> None:
    bench = seasoned()
    bench.open(ENOUGH + 1, due=True)
    bench.until(cmd.Stage)
    bench.now_s += 3.0  # 1.4 s of staging are left, and 0.55 s of the rest
    bench.ask("joins", deadline_s=3)
    assert told(bench, "joins").state is SaveState.SNAPSHOT
    bench.until(cmd.Accept)
    bench.ask("another", tag="own", deadline_s=5.5)  # it must wait for this one, then take 5.5 s itself
    blame = str(told(bench, "another").blame)
    assert "accepting would be late" in blame and "deadline of 7 s or more" in blame


def test_a_request_that_waits_for_an_update_gives_up_when_it_could_no_longer_be_in_time() -> None:
    bench = seasoned()
    bench.feed(ev.WindowClosed())
    bench.ask("r", deadline_s=20)
    assert told(bench, "r").waits_for == "the update's end"
    gives_up_s = bench.core.next_wakeup_s() - bench.now_s
    assert gives_up_s == pytest.approx(14.5)
    bench.feed(ev.Tick(), after_s=gives_up_s + 0.01)
    blame = told(bench, "r").blame
    assert blame is not None and "no update ended in time" in str(blame) and "would be late" in str(blame)
    assert blame.waited_s == pytest.approx(14.51)


def test_a_window_that_opens_in_time_serves_the_request_that_waited() -> None:
    bench = seasoned()
    bench.feed(ev.WindowClosed())
    bench.ask("r", deadline_s=20)
    bench.now_s += 14.0
    bench.open(ENOUGH + 1)
    bench.to_the_end()
    assert told(bench, "r").state in COMMITTED_OR_BEYOND


def test_the_forecast_is_the_95th_percentile_plus_the_margin() -> None:
    timings = Timings()
    for number in range(1, 41):
        timings.note({Phase.STAGING: float(number)})
    forecast = timings.forecast(None)
    assert forecast is not None
    assert forecast.phases == ((Phase.STAGING, pytest.approx(38 * 1.1)),)
    both = timings.forecast((Phase.STAGING, 40.0), None)
    assert both is not None
    assert [seconds for _, seconds in both.phases] == pytest.approx([1.8, 41.8])
