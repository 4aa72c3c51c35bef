"""The stager as a Ray actor: a thin shell around Stager, one per Ray node and run, detached.

It is pinned to its node, takes no CPU, is restarted by Ray when it is killed, and never inherits a placement group
(an actor created inside one dies with it).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..coordinator.messages import AttemptHead, RankReport
from ..coordinator.names import NAMESPACE, coordinator_name, stager_name, stager_prefix
from ..coordinator.options import Options
from ..coordinator.ray_names import named_actors, session_dir
from ..storage.errors import LastgoodError, StagingError
from ..storage.store import open_store
from .finder import READ_BYTES
from .reports import ReportBatch
from .stager import Stager, StagerConfig

log = logging.getLogger("lastgood.stager")

RESTART_S = 1.0  # between two tries of a stager that cannot start again
PEER_S = 30.0  # for one answer of another node's stager


class StagerActor(Stager):
    """Answers what Stager answers, over Ray. `options` is Options.model_dump(mode="json").

    A constructor that raises makes a Ray actor that answers nothing but "died"; so what keeps it from starting is kept
    and told by `identity`, which its creator asks first.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._refusal: LastgoodError | None = None
        self._peers: dict[str, Any] = {}
        self._coordinator: Any = None
        self._reports = ReportBatch(self._send_reports)
        try:
            settings = Options.model_validate(options)
            self._run = settings.run
            super().__init__(_config(settings), open_store(settings.store), self._read_peer, self._tell_coordinator)
        except LastgoodError as error:
            self._refusal = error
            if ray.get_runtime_context().was_current_actor_reconstructed:
                # Nobody asks a restarted stager whether it could start. Ray tries again when the process ends.
                log.error("the stager of %s cannot start again: %s", options.get("run"), error)
                time.sleep(RESTART_S)
                os._exit(1)

    async def identity(self) -> tuple[str, int]:
        """(node, pid): the durable name of the staging directory, and this process. Raises why it could not start."""
        if self._refusal is not None:
            raise self._refusal
        return self.node, os.getpid()

    async def close_down(self) -> None:
        """Releases images and directory. The caller ends the actor after it."""
        if self._refusal is None:
            await self.close()

    def _tell_coordinator(self) -> None:
        """Registrations have changed; the coordinator says hello again. It need not be there."""

        def tell() -> None:
            try:
                coordinator = ray.get_actor(coordinator_name(self._run), namespace=NAMESPACE)
                coordinator.node_changed.remote(self.node)
            except (ray.exceptions.RayError, ValueError) as error:
                log.info("the coordinator of %s does not hear of a change on %s: %s", self._run, self.node, error)

        asyncio.get_running_loop().run_in_executor(None, tell)

    async def report(self, report: RankReport) -> None:
        """A rank of a member-led run tells which step it has ended."""
        self._reports.add(report)

    async def _send_reports(self, reports: Sequence[RankReport]) -> None:
        try:
            if self._coordinator is None:
                name = coordinator_name(self._run)
                self._coordinator = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
            await asyncio.wait_for(self._coordinator.report.remote(list(reports)), PEER_S)
        except (ray.exceptions.RayError, ValueError, asyncio.TimeoutError) as error:
            self._coordinator = None
            log.info("the coordinator of %s did not take %d reports: %s", self._run, len(reports), error)

    async def _read_peer(self, node: str, head: AttemptHead, path: str) -> AsyncIterator[bytes]:
        peer = await self._peer(node)
        begin = 0
        while True:
            try:
                piece = await asyncio.wait_for(peer.read.remote(head, path, begin, READ_BYTES), PEER_S)
            except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
                self._peers.pop(node, None)
                raise StagingError(f"node {node} stopped answering while {path} was read from it", node=node) from error
            if not piece:
                return
            yield piece
            begin += len(piece)

    async def _peer(self, node: str) -> Any:
        if node not in self._peers:
            for handle in await asyncio.to_thread(find_stagers, self._run):
                try:
                    name, _ = await asyncio.wait_for(handle.identity.remote(), PEER_S)
                except (ray.exceptions.RayError, asyncio.TimeoutError):
                    continue
                self._peers[name] = handle
        if node not in self._peers:
            raise StagingError(f"no live stager holds the directory of node {node}", node=node)
        return self._peers[node]


def _config(settings: Options) -> StagerConfig:
    context = ray.get_runtime_context()
    hostname = socket.gethostname()
    staging = settings.staging_on(
        labels={name: str(value) for name, value in context.get_node_labels().items()},
        env=os.environ,
        hostname=hostname,
        node_ip=ray.util.get_node_ip_address(),
        session_dir=session_dir(),
    )
    return StagerConfig(
        run=settings.run,
        staging=Path(staging),
        image_root=Path(settings.image_root),
        holder=f"pid {os.getpid()} on {hostname}, Ray node {context.get_node_id()}",
        address=f"{hostname}:{staging}",
        block_bytes=settings.block_bytes,
        images_per_component=1 if settings.snapshot_freq is None else 2,
    )


def find_stagers(run: str) -> list[Any]:
    """Handles of all live stagers of a run in this cluster."""
    return list(named_actors(stager_prefix(run)).values())


def create_stager(options: Options, ray_node_id: str) -> Any:
    """The stager of one Ray node, created unless it lives already. Returns its handle; it may still be starting."""
    return (
        ray.remote(StagerActor)
        .options(
            name=stager_name(options.run, ray_node_id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node_id, soft=False),
        )
        .remote(options.model_dump(mode="json"))
    )
