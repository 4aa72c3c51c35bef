"""A rank's own side of a grant: within it it goes on without a word, past it it waits."""

from __future__ import annotations

import threading

from lastgood.coordinator.messages import Grant, Line
from lastgood.workers.pace import Pace
from lastgood.workers.reports import ReportBatch

LINE = Line(1, 1, ("m",), 4)
LATER = Line(1, 2, ("m",), 2)


def test_a_grant_covers_its_steps_and_a_report_is_wanted_once_for_each() -> None:
    pace = Pace()
    assert not pace.covers(1)
    pace.open(LINE)
    assert pace.covers(4)
    assert not pace.covers(5)
    pace.take(Grant(LINE, 8, 6), 1)
    assert pace.covers(8)
    assert [pace.wants_report(step) for step in (5, 6, 7)] == [False, True, False]
    pace.take(Grant(LINE, 8, 6), 1)  # repeated, as a sign of life
    assert not pace.wants_report(8)
    pace.take(Grant(LINE, 8, 0), 2)  # a new coordinator wants to know where everybody is
    assert pace.wants_report(8)


def test_a_lower_grant_changes_nothing_and_a_later_line_begins_anew() -> None:
    pace = Pace()
    pace.open(LINE)
    pace.take(Grant(LINE, 8, 6), 1)
    pace.take(Grant(LINE, 7, 6), 1)
    assert pace.covers(8)
    pace.open(LATER)
    assert not pace.covers(3)
    pace.take(Grant(LINE, 9, 7), 1)  # of the line before, on its way when the run was rewound
    assert not pace.covers(3)
    pace.take(Grant(LATER, 3, 2), 1)
    pace.open(LATER)  # the answer to resume came after the first grant
    assert pace.covers(3)


def test_each_outcome_is_told_once_and_a_new_epoch_counts_anew() -> None:
    pace = Pace()
    pace.open(LINE)
    pace.take(Grant(LINE, 5, 5, "a", 1), 1)
    pace.take(Grant(LINE, 5, 5, "a", 1), 1)
    pace.take(Grant(LINE, 6, 5, "b", 2), 1)
    assert pace.outcomes() == ["a", "b"]
    assert pace.outcomes() == []
    pace.take(Grant(LINE, 7, 5, "c", 1), 2)
    assert pace.outcomes() == ["c"]


def test_ranks_at_different_steps_are_told_to_stop_at_the_end_of_one_step() -> None:
    ranks = {22: Pace(), 29: Pace()}  # last step ended -> its pace
    stopped = []
    for ended, pace in ranks.items():
        pace.open(LINE)
        pace.take(Grant(LINE, 30, 25, "a", 1), 1)
        pace.take(Grant(LINE, 30, 25, "disk full", 2, stop_at=31), 1)
        assert pace.outcomes(ended) == ["a"]
        stopped.append(next(step for step in range(ended + 1, 40) if pace.outcomes(step)))
    assert stopped == [31, 31]


def test_who_waits_at_the_step_where_training_stops_is_woken() -> None:
    pace = Pace()
    pace.open(LINE)
    pace.take(Grant(LINE, 5, 5, "another coordinator leads the run", 1, stop_at=6), 1)
    assert not pace.covers(6)
    assert pace.wait(6, 0.0)
    assert pace.outcomes(6) == ["another coordinator leads the run"]
    assert not pace.wait(6, 0.0)


def test_who_waits_is_woken_by_the_grant_that_covers_it() -> None:
    pace = Pace()
    pace.open(LINE)
    assert not pace.wait(6, 0.0)
    thread = threading.Thread(target=lambda: [pace.take(Grant(LINE, step, step), 1) for step in (5, 6)])
    thread.start()
    assert pace.wait(6, 60.0)
    thread.join()


def test_the_time_of_a_step_is_measured_without_the_waiting_and_silence_since_the_last_grant() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    pace.open(LINE)
    pace.left()
    now[0] = 2.0
    pace.ended()
    assert pace.step_s == 2.0
    now[0] = 10.0  # it waited in end_step
    pace.left()
    now[0] = 12.0
    pace.ended()
    assert pace.step_s == 2.0
    assert pace.silent_s() == 12.0
    pace.take(Grant(LINE, 4, 4), 1)
    assert pace.silent_s() == 0.0


def test_reports_that_come_while_a_call_is_out_go_together_with_the_next() -> None:
    import asyncio

    from lastgood.coordinator.messages import MemberId, RankReport

    sent: list[dict[int, int]] = []

    async def scene() -> None:
        gate = asyncio.Event()

        async def send(reports: object) -> None:
            sent.append({report.member.rank: report.step for report in reports})  # pyright: ignore
            await gate.wait()

        batch = ReportBatch(send)
        batch.add(RankReport(MemberId("actor", 0), (1, 1), 1))
        await asyncio.sleep(0)
        for rank, step in ((0, 2), (1, 2), (0, 3)):
            batch.add(RankReport(MemberId("actor", rank), (1, 1), step))
        gate.set()
        while len(sent) < 2:
            await asyncio.sleep(0)

    asyncio.run(scene())
    assert sent == [{0: 1}, {0: 3, 1: 2}]
