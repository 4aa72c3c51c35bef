"""The life of two nodes and a store in chapters, told by the product's own code. Every chapter may be told again.

`go_on` is the same chapter after the processes were killed: the same coordinator asks the restarted stagers the same
things again. Images are gone then, so what was not staged is refused and discarded, as the protocol does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from lastgood.coordinator.epochs import claim_epoch
from lastgood.coordinator.messages import AttemptHead, RecordState, SnapshotOrder
from lastgood.coordinator.retention import collect_remotely
from lastgood.storage.errors import StagingError
from lastgood.storage.manifest import Completed, Manifest, MemberRecord, RoleRecord, ShardRecord
from tests.crash.cluster import COMMITTED_AT, COMPONENTS, DECLARATIONS, MEMBERS, NODES, PATHS, RUN, Place, Stagers
from tests.crash.journal import Journal

FIRST = AttemptHead("A1", 1, 1, 1)
REFUSED = AttemptHead("A2", 2, 1, 2)
SECOND = AttemptHead("A3", 2, 2, 3)  # step 2 again, by another coordinator
AGAIN = AttemptHead("A4", 2, 3, 4)  # step 2 once more after a rewind, although it is committed
NEXT = AttemptHead("A9", 9, 9, 9)
SAVED_AGAIN = "a committed step is saved again"


class Teller:
    """One coordinator's view: its calls, one after the other."""

    def __init__(self, place: Place, journal: Journal, *, again: bool = False) -> None:
        self.place = place
        self.journal = journal
        self.again = again
        self.stagers = Stagers(place)
        self._epoch = 0  # that it leads with; of a teller who goes on a higher one than its attempts'

    async def begin(self, epoch: int) -> None:
        """Opens the stagers and leads them."""
        for node in NODES:
            with self.journal.call("open", node=node) as answer:
                answer["name"] = self.stagers.open(node).node
            await self.stagers.attend(node)
        store = self.place.store
        with self.journal.call("probe"):
            store.probe(RUN)
        self._epoch = epoch
        if store.find(PATHS.epoch(epoch)) is None or self.again:
            with self.journal.call("claim", epoch=epoch, owner=f"owner-{epoch}"):
                self._epoch = claim_epoch(store, PATHS, f"owner-{epoch}", epoch - 1)
                assert self._epoch == epoch or self.again
        for node in NODES:
            with self.journal.call("hello", node=node, epoch=self._epoch):
                await self.stagers.of[node].hello(self._epoch, DECLARATIONS)

    async def end(self) -> None:
        await self.stagers.close()

    async def save(self, head: AttemptHead, *, refuse: bool = False) -> None:
        """One attempt to its end: durable, or refused and discarded."""
        epoch, of = self._epoch, self.stagers.of
        if not self.again:
            for node in NODES:
                await of[node].mark(epoch, head.step, 30.0)
                await of[node].snapshot(epoch, SnapshotOrder(head, (MEMBERS[node],), 30.0))
        shards: list[ShardRecord] = []
        for node in NODES:
            try:
                with self.journal.call("stage", node=node, head=head) as answer:
                    answer["shards"] = tuple(await of[node].stage(epoch, head, 30.0))
                shards += answer["shards"]
            except StagingError:
                if not self.again:
                    raise
                refuse = True  # its images are gone
        manifest = b"" if refuse else self._manifest(head, shards)
        if not refuse:
            for node in NODES:
                with self.journal.call("accept", node=node, head=head, manifest=manifest) as answer:
                    answer["state"] = await of[node].accept(epoch, head, manifest)
                refuse = refuse or answer["state"] is not RecordState.ACCEPT
            if not refuse:  # whoever asks too late is told that the accept stands
                with self.journal.call("refuse", node=NODES[0], head=head) as answer:
                    answer["state"] = await of[NODES[0]].refuse(epoch, head, "too late")
        if refuse:
            for node in NODES:
                with self.journal.call("refuse", node=node, head=head) as answer:
                    answer["state"] = await of[node].refuse(epoch, head, "the story says so")
            for node in NODES:
                with self.journal.call("discard", node=node, head=head):
                    await of[node].discard(epoch, head)
            return
        completed = Completed.of(Manifest.from_bytes(manifest, where="m"), manifest, COMMITTED_AT)
        for node in NODES:
            with self.journal.call("publish", node=node, head=head):
                await of[node].publish(epoch, completed, manifest)
        with self.journal.call("ledger", head=head):
            await asyncio.to_thread(self.place.remote.write_ledger, completed)
        for node in NODES:
            with self.journal.call("upload", node=node, head=head, shards=tuple(shards)):
                await of[node].upload(epoch, head)
        with self.journal.call("complete", head=head, hints=not self.again):
            await asyncio.to_thread(self.place.remote.complete, completed, manifest)
        for node in NODES:
            with self.journal.call("note_durable", node=node, head=head):
                await of[node].note_durable(epoch, head)

    def _manifest(self, head: AttemptHead, shards: list[ShardRecord]) -> bytes:
        of = self.stagers.of
        return Manifest(
            run=RUN,
            attempt=head.attempt,
            step=head.step,
            epoch=head.epoch,
            sequence=head.sequence,
            kind="scheduled",
            created_at="2031-05-06T07:08:09.000Z",
            roles={MEMBERS[node].role: RoleRecord(world_size=1, components=COMPONENTS[node]) for node in NODES},
            members=tuple(
                MemberRecord(role=MEMBERS[node].role, rank=0, node=of[node].node, updates=1) for node in NODES
            ),
            participants=tuple(of[node].node for node in NODES),
            shards=tuple(shards),
        ).to_bytes()

    async def collect(self, head: AttemptHead) -> None:
        """Retention lets a checkpoint go: in the store first, then on the nodes."""
        with self.journal.call("collect remotely", head=head):
            await asyncio.to_thread(collect_remotely, self.place.store, PATHS, head, "retention")
        for node in NODES:
            with self.journal.call("collect", node=node, head=head):
                await self.stagers.of[node].collect(self._epoch, head, "retention")

    async def fetch(self, head: AttemptHead) -> None:
        """A resume on the other node: a shard comes from the store into the node's directory, and goes again."""
        manifest = Manifest.from_bytes(self.place.store.get(PATHS.manifest(head.step, head.attempt)), where="store")
        of = self.stagers.of
        record = manifest.shards_of(of["n1"].node)[0]
        with self.journal.call("fetch", node="n2"):
            assert await of["n2"].locate(head, record, (), None) is not None
        with self.journal.call("forget", node="n2"):
            await of["n2"].forget(self._epoch)


async def _first(teller: Teller) -> None:
    await teller.begin(1)
    await teller.save(FIRST)


async def _refused(teller: Teller) -> None:
    await teller.begin(1)
    await teller.save(REFUSED, refuse=True)


async def _second(teller: Teller) -> None:
    await teller.begin(2)
    await teller.save(SECOND)


async def _again(teller: Teller) -> None:
    await teller.begin(3)
    await teller.save(AGAIN)


async def _collected(teller: Teller) -> None:
    await teller.begin(3)
    await teller.fetch(SECOND)
    await teller.collect(FIRST)


CHAPTERS: dict[str, Callable[[Teller], Awaitable[None]]] = {
    "the first save": _first,
    "a refused save": _refused,
    "a save of a second coordinator": _second,
    SAVED_AGAIN: _again,
    "a resume and a collection": _collected,
}


def tell(chapter: str, place: Place, journal: Journal, *, again: bool = False) -> None:
    """Tells one chapter, from start of the stagers to their end."""

    async def scene() -> None:
        teller = Teller(place, journal, again=again)
        await CHAPTERS[chapter](teller)
        await teller.end()

    asyncio.run(scene())
