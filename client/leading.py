"""What a driver and a leading rank have in common: the terms of a resume, what the outcome of a step means, the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..coordinator import option_values
from ..coordinator.options import Options
from ..coordinator.outcomes import DrainOutcome, StepOutcome
from ..coordinator.restore import ResumeTermsOrder
from ..coordinator.versions import versions
from ..storage.errors import DeadlineError, OptionsError, SaveFailedError, UsageError

log = logging.getLogger("lastgood")

ONE_TIME = ("takeover", "resume", "allow_changes", "on_reshard")  # for one attach or resume, not for the coordinator


def changed_options(options: Options, hello: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options that differ from those of a live coordinator: name -> (here, there). `hello`: its word on itself."""
    ours, theirs = options.model_dump(mode="json"), hello["options"]
    names = sorted(name for name in ours if ours[name] != theirs.get(name) and name not in ONE_TIME)
    return {name: (ours[name], theirs.get(name)) for name in names}


def other_version(hello: Mapping[str, Any]) -> tuple[str, str] | None:
    """(lastgood here, lastgood of a live coordinator) when they differ."""
    here = versions()["lastgood"]
    there = str(hello.get("versions", {}).get("lastgood", "of an unknown version"))
    return None if here == there else (here, there)


def resume_mode(mode: Any) -> int | str:
    """A mode of resume. Raises OptionsError for one that is not known, and for a path that is relative."""
    try:
        return option_values.resume_target(mode)
    except ValueError as error:
        raise OptionsError(
            f"resume={mode!r}: {error}. It takes 'auto', 'latest', 'none', a step number, or the absolute path of a "
            "checkpoint. Nothing was touched.",
            option="resume",
        ) from error


def resume_terms(
    options: Options, allow_changes: Sequence[str], on_reshard: Mapping[str, str] | None
) -> ResumeTermsOrder:
    """The terms of a resume: the options', and what the call adds to them."""
    return ResumeTermsOrder(
        options.resume_deadline_s,
        (*options.allow_changes, *allow_changes),
        {**options.on_reshard, **(on_reshard or {})},
    )


def metrics_of(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as floats. Raises UsageError naming the one that is no number."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"metrics is {metrics!r}; it takes a dict of names to numbers. Nothing was touched.")
    values: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError("a text")
            values[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"metric {name!r} is {value!r}, which is not a number. Nothing was touched; leave it out, or keep it "
                "in the driver's own state.",
                metric=name,
            ) from error
    return values


def heed(outcome: StepOutcome, options: Options) -> None:
    """Logs what has failed, and alarms, since the last step. Raises SaveFailedError when training must stop."""
    for sentence in (*outcome.failures, *outcome.alarms):
        log.warning("%s", sentence)
    if outcome.stop:
        raise SaveFailedError(
            f"{'; '.join(outcome.failures)}. Training stops here after step {outcome.step} "
            f"(on_failure={options.on_failure!r}, max_consecutive_failures={options.max_consecutive_failures}); the "
            "previous checkpoint stands.",
            step=outcome.step,
            failures=outcome.failures,
        )


def end_limit_s(options: Options, timeout_s: float | None) -> float:
    """How long close() may take: its argument, or time for a last save and every upload."""
    return timeout_s if timeout_s is not None else options.save_deadline_s + options.upload_deadline_s


def check_drained(run: str, drained: DrainOutcome, limit_s: float) -> None:
    """Raises DeadlineError naming what is not durable at the end of a run."""
    if not drained.drained:
        raise DeadlineError(
            f"run {run} is not durable after {limit_s:.0f} s: {' '.join(drained.lagging)} What is committed stands on "
            "the nodes' disks; the coordinator goes on uploading. Call close() again.",
            waited_s=limit_s,
        )
