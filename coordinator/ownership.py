"""Which cluster leads a run: owner.json in the store, refreshed while the coordinator lives. A courtesy, not the fence.

It makes an attach from another cluster refuse while the owner is fresh, and names it. What truly fences is the epoch:
a coordinator that finds a higher one claimed in the store stops. Freshness is observed (does the heartbeat move?), so
clocks that differ between clusters do no harm. Synchronous; run it in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..storage.errors import IntegrityError, StoreUnavailableError, UsageError
from ..storage.ids import utc_text
from ..storage.layout import RunPaths, epochs_in
from ..storage.manifest import Owner
from ..storage.store import Store

STALE_AFTER_BEATS = 3  # intervals without a new heartbeat until an owner counts as gone


@dataclass(frozen=True)
class Identity:
    """Who wants to lead. `cluster` names the Ray cluster: within one, Ray itself allows one coordinator of a name."""

    cluster: str
    token: str  # of this incarnation
    address: str  # for people: host, process, cluster


class Ownership:
    """One coordinator's claim to lead a run."""

    def __init__(
        self,
        store: Store,
        paths: RunPaths,
        identity: Identity,
        interval_s: float,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.interval_s = interval_s
        self._store = store
        self._paths = paths
        self._identity = identity
        self._clock = clock
        self._sleep = sleep

    def check(self, takeover: bool, tell: Callable[[str], None] = lambda _: None) -> None:
        """Returns when the run is free to lead: nobody, a silent owner, one of this cluster, or `takeover`.

        Raises UsageError naming the owner, after having seen its heartbeat move; takes STALE_AFTER_BEATS of the
        owner's intervals at most. `tell` is given a sentence when it begins to wait.
        """
        first = self._read()
        if first is None or takeover or self._cluster_of(first) == self._identity.cluster:
            return
        tell(
            f"run {self._paths.run} was led by {first.address}, last heard of at {first.heartbeat_at}; within "
            f"{first.interval_s * STALE_AFTER_BEATS:.0f} s it is known whether that one still lives"
        )
        for _ in range(STALE_AFTER_BEATS * 2):
            self._sleep(first.interval_s / 2)
            now = self._read()
            if now is not None and now != first:
                raise UsageError(
                    f"run {self._paths.run} in {self._store.url} is led by {now.address} (epoch {now.epoch}, heartbeat "
                    f"{now.heartbeat_at}). Nothing was touched. End that run first, or pass takeover=True: its "
                    "coordinator then stops with FencedError, what it has committed stands.",
                    run=self._paths.run,
                    owner=now.address,
                )

    def beat(self, epoch: int) -> str | None:
        """Tells that this coordinator lives; answers why it must stop when a newer one has claimed an epoch.

        Raises StoreUnavailableError when its own epoch is not there: then this is not the store (a mount was lost).
        """
        epochs = epochs_in(self._store.list(f"{self._paths.epochs}/"))
        highest = max(epochs, default=0)
        if highest > epoch:
            newer = self._read()
            who = f" ({newer.address})" if newer is not None and newer.epoch > epoch else ""
            return f"epoch {highest} was claimed in the store by a newer coordinator{who}"
        if epoch not in epochs:
            raise StoreUnavailableError(
                f"epoch {epoch} of run {self._paths.run} is not in {self._store.url} any more: is its file system "
                "still mounted? Nothing was written there.",
                epoch=epoch,
            )
        owner = Owner(
            run=self._paths.run,
            owner=f"{self._identity.cluster}/{self._identity.token}",
            epoch=epoch,
            address=self._identity.address,
            heartbeat_at=utc_text(self._clock()),
            interval_s=self.interval_s,
        )
        self._store.replace(self._paths.owner, owner.to_bytes())
        return None

    def leave(self) -> None:
        """The run has ended well: nobody leads it, the next attach need not wait."""
        standing = self._read()
        if standing is not None and standing.owner.endswith(f"/{self._identity.token}"):
            self._store.delete_many([self._paths.owner])

    def _read(self) -> Owner | None:
        data = self._store.find(self._paths.owner)
        if data is None:
            return None
        try:
            return Owner.from_bytes(data, where=self._paths.owner)
        except IntegrityError:
            return None  # it is a courtesy; garbage in it must not stop a run

    @staticmethod
    def _cluster_of(owner: Owner) -> str:
        return owner.owner.rpartition("/")[0]
