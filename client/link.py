"""Calls to a run's coordinator, by name, repeated over its restarts until their deadline.

Ray restarts a killed coordinator, it recovers, and the same call goes on: that is why every call may be repeated there.
What a driver asks at every step goes over the coordinator's socket when both are on one node (node_socket.py).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from ..coordinator.names import NAMESPACE, STEP_CALLS, coordinator_name
from ..coordinator.node_socket import NodeSocket
from ..coordinator.ray_names import named_actors
from ..storage.errors import DeadlineError, UsageError

log = logging.getLogger("lastgood")

RETRY_S = 0.1  # between two tries to reach a coordinator that is gone
NEAR_TRIES = 3  # in a row, until a coordinator of the same node is asked over Ray only
GONE_S = 1.0  # how long a coordinator may be unknown by name before it counts as ended
CALL_S = 120.0  # for calls that answer at once, a coordinator's restart and recovery included


class CoordinatorLink:
    """Calls to the coordinator, by name, repeated over its restarts until their deadline."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._handle: Any = None
        self._socket: NodeSocket | None = None
        self._near_tries = NEAR_TRIES

    def call(self, method: str, *arguments: Any, timeout_s: float, again: bool = False) -> Any:
        """`again`: a last argument tells whether the call is repeated.

        Raises UsageError when no coordinator of the run lives, DeadlineError, or the call's own error.
        """
        until = time.monotonic() + timeout_s
        there = self._near(timeout_s) if method in STEP_CALLS else None
        if there is None:
            return self._over_ray(method, arguments, until, timeout_s, again, repeated=False)
        try:
            told = (*arguments, False) if again else arguments
            answer = there.call(method, max(until - time.monotonic(), 0.0), *told)
            self._near_tries = NEAR_TRIES
            return answer
        except TimeoutError as error:
            raise self._late(method, timeout_s) from error
        except (OSError, EOFError) as error:
            log.info("the coordinator of %s is asked over Ray: its socket failed at %s (%s)", self.run, method, error)
            self._socket = None
            self._near_tries -= 1
            return self._over_ray(method, arguments, until, timeout_s, again, repeated=True)

    def _near(self, timeout_s: float) -> NodeSocket | None:
        if self._socket is None and self._near_tries:
            hello = self.call("hello", timeout_s=timeout_s)
            if hello.get("door") is None or hello["ray_node"] != ray.get_runtime_context().get_node_id():
                self._near_tries = 0
            else:
                self._socket = NodeSocket(Path(hello["door"]))
        return self._socket

    def _over_ray(
        self, method: str, arguments: tuple[Any, ...], until: float, timeout_s: float, again: bool, *, repeated: bool
    ) -> Any:
        gone_since: float | None = None
        while True:
            left = until - time.monotonic()
            told = (*arguments, repeated) if again else arguments
            try:
                if self._handle is None:
                    self._handle = ray.get_actor(coordinator_name(self.run), namespace=NAMESPACE)
                    self._near_tries = NEAR_TRIES  # it may live on this node now
                gone_since = None
                return ray.get(getattr(self._handle, method).remote(*told), timeout=max(left, 0.0))
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
