"""The images of a node by the component they are for: which are in use, which can be filled next, which must go.

Each component of each member has one image, or two when the run keeps snapshots in memory: the newest whole one stays
untouched while the next is copied. Used on the stager's event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..coordinator.messages import MemberId
from ..storage.errors import SnapshotError
from .images import Image, ImageRoom, ImageState
from .orders import ImageRequest

Key = tuple[MemberId, str]  # member, component


@dataclass
class _Slot:
    """One image; reused while it is large enough."""

    image: Image
    process: str


class Slots:
    """Every image of one stager."""

    def __init__(
        self, room: ImageRoom, node: str, per_component: int, create: Callable[[ImageRequest], Awaitable[Image]]
    ) -> None:
        """`per_component`: how many images one component may have at a time. `create` makes one in the room."""
        self._room = room
        self._create = create
        self._node = node
        self._per_component = per_component
        self._slots: dict[Key, list[_Slot]] = {}
        self._providing = asyncio.Lock()

    async def provide(
        self, process: str, requests: Sequence[ImageRequest], awaited: Collection[str]
    ) -> Mapping[Key, str]:
        """Paths of free images with room for what a process will write; those of `awaited` attempts stay as they are.

        Raises SnapshotError if memory is too small, or every image of a component still waits to be staged.
        """
        async with self._providing:
            for request in requests:
                self._make_room((request.member, request.component), process, request.nbytes, awaited)
            paths: dict[Key, str] = {}
            for request in requests:
                key = (request.member, request.component)
                free = [slot for slot in self._slots.get(key, []) if not _is_awaited(slot, awaited)]
                slot = min(free, key=lambda slot: slot.image.state is ImageState.STAGED, default=None)
                if slot is None:
                    slot = _Slot(await self._create(request), process)
                    self._slots.setdefault(key, []).append(slot)
                elif slot.image.state is not ImageState.FREE:  # half-copied for an attempt that failed, or staged
                    slot.image.free()
                paths[key] = str(slot.image.path)
            return paths

    def _make_room(self, key: Key, process: str, nbytes: int, awaited: Collection[str]) -> None:
        """Lets go of images that this process cannot fill, before others are made: memory need not hold both."""
        kept: list[_Slot] = []
        for slot in self._slots.get(key, []):
            if _is_awaited(slot, awaited) or (slot.process == process and slot.image.capacity >= nbytes):
                kept.append(slot)
            else:
                self._room.destroy(slot.image)
        self._slots[key] = kept
        waiting = [slot.image.attempt for slot in kept if _is_awaited(slot, awaited)]
        if len(waiting) >= self._per_component:
            raise SnapshotError(
                f"the image of {key[0]}.{key[1]} still waits to be staged for attempt {', '.join(waiting)}",
                member=key[0],
                node=self._node,
            )

    def are_taken(self, keys: Iterable[Key], awaited: Collection[str]) -> bool:
        """Whether some component can be given no image: all that it may have hold `awaited` attempts."""
        return any(
            sum(_is_awaited(slot, awaited) for slot in self._slots.get(key, ())) >= self._per_component for key in keys
        )

    def find(self, key: Key, path: str) -> Image | None:
        """The image at `path`, if it was given to this component."""
        return next((slot.image for slot in self._slots.get(key, []) if str(slot.image.path) == path), None)

    def release(self, attempt: str, living: Collection[str]) -> None:
        """The attempt needs its images no longer: they may be filled again, or go with their process.

        An image that a member is filling right now is left alone. `living`: processes that are registered.
        """
        for key, slot in list(self._all()):
            if slot.image.attempt != attempt or slot.image.state not in (ImageState.SEALED, ImageState.STAGED):
                continue
            if slot.process in living:
                slot.image.free()
            else:
                self._destroy(key, slot)

    def images(self) -> list[tuple[Key, Image]]:
        """Every image here, with the component that it is for."""
        return [(key, slot.image) for key, slot in self._all()]

    def attempts_of(self, key: Key) -> list[str]:
        """The attempts that the component's images were filled for last."""
        return [slot.image.attempt for slot in self._slots.get(key, [])]

    def staged(self, key: Key, attempt: str, nbytes: int) -> Image | None:
        """The image that a component's shard of an attempt was staged from, if it still lies in memory."""
        for slot in self._slots.get(key, []):
            image = slot.image
            if image.state is ImageState.STAGED and image.attempt == attempt and image.used_bytes == nbytes:
                return image
        return None

    def bury(self, process: str, given_up: Collection[str]) -> None:
        """A process is gone. What it copied whole outlives it, unless that attempt was given up: it may still commit,
        and a resume reads from it."""
        for key, slot in list(self._all()):
            whole = slot.image.state in (ImageState.SEALED, ImageState.STAGED)
            if slot.process == process and not (whole and slot.image.attempt not in given_up):
                self._destroy(key, slot)

    def drop_orphans(self, living: Collection[str], awaited: Collection[str]) -> None:
        """A resume is over: images that are staged and whose processes are gone are of no more use, unless the rest of
        their attempt is still being staged."""
        for key, slot in list(self._all()):
            staged = slot.image.state is ImageState.STAGED and not _is_awaited(slot, awaited)
            if staged and slot.process not in living:
                self._destroy(key, slot)

    def _all(self) -> Iterator[tuple[Key, _Slot]]:
        return ((key, slot) for key, slots in self._slots.items() for slot in slots)

    def _destroy(self, key: Key, slot: _Slot) -> None:
        self._slots[key].remove(slot)
        self._room.destroy(slot.image)


def _is_awaited(slot: _Slot, awaited: Collection[str]) -> bool:
    """Whether what it holds may still have to be written: also what is staged, until all of its attempt is. A staging
    that fails is done again, from these bytes."""
    return slot.image.state in (ImageState.SEALED, ImageState.STAGED) and slot.image.attempt in awaited
