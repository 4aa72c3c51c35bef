"""An agent's way to its node's stager: found through Ray, spoken to over a socket (node_socket.py).

The only Ray code that runs inside a user's process. The stager is found by name again after every failure, so an agent
survives its restart. Handles are held only to lastgood's own actors, never to the user's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from ..coordinator.messages import AttemptHead, MemberId, MemberInfo, RankReport
from ..coordinator.names import NAMESPACE, stager_name
from ..coordinator.node_socket import NodeSocket
from ..coordinator.ray_names import plain
from ..storage.errors import LastgoodError, StagingError
from ..storage.manifest import ShardRecord
from .agent import StagerGoneError
from .orders import Answer, ImageRequest, Order

log = logging.getLogger("lastgood.agent")

CALL_S = 60.0  # for calls that answer at once
LOCATE_S = 3600.0  # for a shard that is fetched from another node or the store first


class RayStagerLink:
    """Implements agent.StagerLink. Made in the member's process, for the stager of the same Ray node."""

    def __init__(self, run: str, ray_node_id: str) -> None:
        self._name = stager_name(run, ray_node_id)
        self._handle: Any = None
        self._socket: NodeSocket | None = None  # of the stager that this process is registered with

    def register(self, process: str, pid: int, pid_namespace: str, members: Sequence[MemberInfo]) -> str:
        folder = self._find("register", process, pid, pid_namespace, members)
        if self._socket is None or self._socket.folder != Path(folder):
            self._socket = NodeSocket(Path(folder))
        return folder

    def unregister(self, process: str) -> None:
        self._call("unregister", CALL_S, process)

    def poll(self, process: str, answer: Answer | None, wait_s: float) -> Order | None:
        if self._socket is None:
            return None  # as a stager says to whom it does not know: register again
        return self._call("poll", wait_s + CALL_S, process, answer, wait_s)

    def provide(self, process: str, requests: Sequence[ImageRequest]) -> Mapping[tuple[MemberId, str], str]:
        return self._call("provide", CALL_S, process, requests)

    def copying(self, process: str, attempt: str) -> None:
        self._call("member_copying", CALL_S, process, attempt)

    def locate(
        self, head: AttemptHead, record: ShardRecord, rejected: Sequence[str], source: str | None
    ) -> tuple[str, str] | None:
        return self._call("locate", LOCATE_S, head, record, list(rejected), source)

    def tell(self, report: RankReport, *, again: bool = False) -> None:
        """Hands a rank's report to the stager, for the coordinator; waits for nothing. `again`: it had no effect."""
        try:
            if self._handle is None or again:
                self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
            self._handle.report.remote(report)
        except Exception as error:  # noqa: BLE001 - see _call; a report is told again while its rank waits
            self._handle = None
            log.debug("%s does not take a report: %s", self._name, error)

    def _call(self, method: str, timeout_s: float, *arguments: Any) -> Any:
        there = self._socket
        if there is None:
            raise StagerGoneError(f"this process is not registered with {self._name}")
        try:
            return there.call(method, timeout_s, *arguments)
        except (OSError, EOFError) as error:
            if self._socket is there:
                self._socket = None
            raise StagerGoneError(f"{self._name} does not answer {method}: {error}") from error

    def _find(self, method: str, *arguments: Any) -> Any:
        try:
            if self._handle is None:
                self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=CALL_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LastgoodError):
                raise error.cause from None
            raise StagingError(
                f"{self._name} could not {method}: {type(error.cause).__name__}: {error.cause}. The previous "
                "checkpoint stands; look at the stager's log in Ray's dashboard."
            ) from error
        except Exception as error:
            # Dead, restarting, not there by that name (ValueError), or Ray was shut down and started anew (a bare
            # Exception): look for it again.
            self._handle = None
            raise StagerGoneError(f"{self._name} does not answer {method}: {plain(error)}") from error
