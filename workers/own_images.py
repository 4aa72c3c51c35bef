"""The images that this process fills: mapped, laid out, bound, and made ahead of the first save.

The first copy into fresh memory is slower than all later ones: its pages must be found, cleared and mapped first. So
as soon as the state's structure is known (at the first end_step, or when a resume is over), a thread of its own does
that while training goes on. What it cannot do is tried again by the save, which then tells.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..coordinator.messages import MemberId
from ..storage.failpoints import failpoint
from ..storage.image import BoundImage, ImageLayout
from ..storage.tree import Flat
from .images import Image
from .orders import ImageRequest, SealedShard

log = logging.getLogger("lastgood.agent")

Key = tuple[MemberId, str]  # member, component
Provide = Callable[[Sequence[ImageRequest]], Mapping[Key, str]]


class OwnImages:
    """Of one agent. `lay_out` and `fill` are called by one thread; another may be making images meanwhile."""

    def __init__(self, provide: Provide) -> None:
        """`provide`: asks the stager for paths of free images that have room."""
        self._provide = provide
        self._images: dict[str, Image] = {}
        self._bound: dict[str, BoundImage] = {}
        self._paths: dict[Key, str] = {}  # the image each component was given last
        self._layouts: dict[Key, ImageLayout] = {}
        self._one = threading.Lock()  # one thread at a time asks for images, maps and binds them
        self._making: threading.Thread | None = None

    def lay_out(self, key: Key, flat: Flat) -> None:
        """Finds the place of everything in the component's image. Raises EncodeError when it cannot be one file."""
        self._layouts[key] = ImageLayout.of(flat, self._layouts.get(key))

    def nbytes(self, key: Key) -> int:
        """Of the component's shard as it was laid out last."""
        return self._layouts[key].nbytes

    def fill(self, attempt: str, flats: Mapping[Key, Flat]) -> tuple[SealedShard, ...]:
        """Copies what was laid out into images, and seals them. Raises what `provide` raises, and SnapshotError."""
        layouts = {key: self._layouts[key] for key in flats}
        with self._one:
            self._have(layouts, attempt)
            return tuple(self._fill(key, flat, attempt) for key, flat in flats.items())

    def _fill(self, key: Key, flat: Flat, attempt: str) -> SealedShard:
        path, layout = self._paths[key], self._layouts[key]
        image = self._images[path]
        image.begin(attempt)
        failpoint("member.copy")
        self._bound[path].write(flat)
        image.seal(layout.nbytes)
        return SealedShard(*key, str(image.path), layout.nbytes, layout.chunks)

    def make_ahead(self, keys: Sequence[Key]) -> None:
        """Makes the images that are missing for what was laid out, in a thread of its own. Returns at once.

        Those that are there stay as they are: a save that is not committed yet may still be taken from them.
        """
        layouts = {key: self._layouts[key] for key in keys if not self._has(key)}
        self._making = threading.Thread(target=self._make, args=(layouts,), name="lastgood-images", daemon=True)
        self._making.start()

    def _has(self, key: Key) -> bool:
        return key in self._paths and Path(self._paths[key]).exists()

    def _make(self, layouts: Mapping[Key, ImageLayout]) -> None:
        try:
            with self._one:
                self._have(layouts, "")
                for key in layouts:
                    self._images[self._paths[key]].fault_in()
        except Exception as error:  # noqa: BLE001 - the next save does it, or tells why it cannot
            log.warning("images for the next save could not be made ahead: %s", error)

    def _have(self, layouts: Mapping[Key, ImageLayout], attempt: str) -> None:
        """Every component has a free image, mapped here and bound to its layout (binding thousands of tensors takes
        time, so it is kept)."""
        requests = [ImageRequest(*key, layout.nbytes, attempt) for key, layout in layouts.items()]
        self._let_go(requests)
        self._paths.update(self._provide(requests))
        for key, layout in layouts.items():
            path = self._paths[key]
            image = self._images.get(path)
            if image is None:
                image = self._images[path] = Image.open(Path(path))
            bound = self._bound.get(path)
            if bound is None or bound.layout is not layout:
                self._bound[path] = layout.bind(image.payload)

    def _let_go(self, requests: Sequence[ImageRequest]) -> None:
        """Unmaps images that are gone or too small before others are asked for: memory need not hold both."""
        needed = {self._paths.get((request.member, request.component)): request.nbytes for request in requests}
        for path, image in list(self._images.items()):
            if not Path(path).exists() or image.capacity < needed.get(path, 0):
                self._bound.pop(path, None)
                self._images.pop(path).close()

    def close(self) -> None:
        """Unmaps them all."""
        with self._one:
            self._bound.clear()
            for image in self._images.values():
                image.close()
            self._images.clear()
