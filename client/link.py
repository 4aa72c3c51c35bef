"""Calls to a run's coordinator, by name, repeated over its restarts until their deadline.

Ray restarts a killed coordinator, it recovers, and the same call goes on: that is why every call may be repeated there.
"""

from __future__ import annotations

import time
from typing import Any

import ray
import ray.exceptions

from ..coordinator.names import NAMESPACE, coordinator_name
from ..coordinator.ray_names import named_actors
from ..storage.errors import DeadlineError, UsageError

RETRY_S = 0.1  # between two tries to reach a coordinator that is gone
GONE_S = 1.0  # how long a coordinator may be unknown by name before it counts as ended
CALL_S = 120.0  # for calls that answer at once, a coordinator's restart and recovery included


class CoordinatorLink:
    """Calls to the coordinator, by name, repeated over its restarts until their deadline."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._handle: Any = None

    def call(self, method: str, *arguments: Any, timeout_s: float, again: str | None = None) -> Any:
        """`again`: name of a keyword that is set when the call is repeated.

        Raises UsageError when no coordinator of the run lives, DeadlineError, or the call's own error.
        """
        until = time.monotonic() + timeout_s
        gone_since: float | None = None
        repeated = False
        while True:
            left = until - time.monotonic()
            keywords = {} if again is None else {again: repeated}
            try:
                if self._handle is None:
                    self._handle = ray.get_actor(coordinator_name(self.run), namespace=NAMESPACE)
                gone_since = None
                return ray.get(getattr(self._handle, method).remote(*arguments, **keywords), timeout=max(left, 0.0))
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, Exception):
                    raise error.cause from None
                raise
            except ray.exceptions.GetTimeoutError as error:
                raise self._late(method, timeout_s) from error
            except ValueError:  # Ray knows no actor of that name; one that it restarts keeps its name
                gone_since = gone_since if gone_since is not None else time.monotonic()
                if time.monotonic() - gone_since > GONE_S:
                    raise self._gone() from None
            except ray.exceptions.RayError as error:
                if left <= 0:
                    raise self._late(method, timeout_s) from error
            self._handle = None
            repeated = True
            time.sleep(min(RETRY_S, max(left, 0.0)))

    def _gone(self) -> UsageError:
        runs = sorted(name.partition(":")[2] for name in named_actors(coordinator_name("")))
        there = f"those of {', '.join(runs)} do" if runs else "none does"
        return UsageError(
            f"no coordinator of run {self.run!r} lives in the Ray cluster {ray.get_runtime_context().gcs_address} "
            f"({there}): it was closed, ended after linger_s without a process of the run, or lives in another cluster "
            "(pass its address). Committed checkpoints stand. In the driver call lastgood.attach again; without a "
            "cluster: lastgood latest <store>/<run>.",
            run=self.run,
        )

    def _late(self, method: str, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"the coordinator of run {self.run} has not answered {method} within {timeout_s:.1f} s. Committed "
            "checkpoints stand. Look at `lastgood status` and the coordinator's log in Ray's dashboard.",
            waited_s=timeout_s,
        )
