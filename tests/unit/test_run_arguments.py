"""What a driver hands to a run is checked before anything is asked of the cluster."""

from __future__ import annotations

from typing import Any

import pytest

from lastgood.client.run import Run
from lastgood.coordinator.messages import Progress
from lastgood.coordinator.options import Options
from lastgood.coordinator.outcomes import DrainOutcome, StepOutcome
from lastgood.storage.errors import OptionsError, UsageError


class Link:
    """Notes calls instead of making them."""

    run = "r"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def call(self, method: str, *arguments: Any, timeout_s: float, again: bool = False) -> Any:
        self.calls.append((method, arguments))
        if method == "end_step":
            return StepOutcome(arguments[0], "no save was due")
        return DrainOutcome(False, ("stays",)) if method == "finish" else None


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def run(link: Link) -> Run:
    options = Options(run="r", store="/nfs/ckpts", staging="/local/ckpt")
    return Run(options, link, leads=True)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "metrics", [{"reward": "high"}, {"reward": "0.1"}, {"reward": None}, {"reward": {"mean": 1}}, "reward", [1.0]]
)
def test_a_metric_that_is_no_number_is_named(run: Run, link: Link, metrics: Any) -> None:
    with pytest.raises(UsageError, match=r"reward|dict of names"):
        run.end_step(1, metrics=metrics)
    assert link.calls == []


@pytest.mark.parametrize("step", [-1, True, "3", 1.0])
def test_a_step_is_a_whole_number(run: Run, link: Link, step: Any) -> None:
    with pytest.raises(UsageError, match="whole number"):
        run.end_step(step)
    assert link.calls == []


def test_steps_do_not_go_back_without_a_resume_and_one_that_is_left_out_is_told(
    run: Run, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 2):
        run.end_step(step)
    assert not caplog.text
    with pytest.raises(UsageError, match=r"step 2 has ended already.*resume\(0\)"):
        run.end_step(1)
    assert len(link.calls) == 3
    run.end_step(7)
    assert "end_step(7) follows step 2" in caplog.text


@pytest.mark.parametrize("mode", ["lates", "ckpts/r/global_step_4", "../x", -1, 1.5])
def test_a_mode_of_resume_that_is_not_known_and_a_relative_path_are_refused(run: Run, link: Link, mode: Any) -> None:
    with pytest.raises(OptionsError, match="resume"):
        run.resume(mode)
    assert link.calls == []


@pytest.mark.parametrize("state", [[1], 5, None, lambda: [1]])
def test_the_drivers_state_is_a_dict(run: Run, link: Link, state: Any) -> None:
    with pytest.raises(UsageError, match="dict from component names"):
        run.add_driver(state)
    assert link.calls == []


def test_a_save_with_a_bad_tag_or_deadline_is_refused(run: Run, link: Link) -> None:
    for keywords in ({"tag": "a/b"}, {"deadline_s": 0}, {"deadline_s": -3.0}):
        with pytest.raises(OptionsError):
            run.save(**keywords)  # pyright: ignore[reportArgumentType]
    assert link.calls == []


@pytest.mark.parametrize("save_last", [None, False])
def test_close_asks_for_the_last_step_unless_told_otherwise(run: Run, link: Link, save_last: bool | None) -> None:
    run._progress = Progress(last_step=7)
    with pytest.raises(Exception, match="stays"):
        run.close(save_last=save_last)
    (method, arguments) = link.calls[-1]
    assert method == "finish"
    assert arguments[2].last_step == (7 if save_last is None else None)
