"""A point in the work of this process's accelerators. The rule: a copy starts only after the last update's kernels.

Capture runs in another thread than training, and their streams know nothing of each other; so the update records an
event on its own stream, and the copier waits for it. Only devices that hold the member's tensors are asked: touching
another one would allocate a context there. On CPU nothing happens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch


class DeviceFence:
    """The end of the last update on the devices that hold a member's tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[torch.device, torch.Event] = {}

    def record(self, devices: Iterable[torch.device]) -> None:
        """Marks this point on the current stream of `devices`; called right after the update, in its thread."""
        for device in accelerators(devices):
            event = torch.accelerator.current_stream(device).record_event()
            with self._lock:
                self._events[device] = event

    def wait(self, devices: Iterable[torch.device]) -> None:
        """Returns when the work before the last record() is done; where none was made, when the device is idle."""
        for device in accelerators(devices):
            with self._lock:
                event = self._events.get(device)
            if event is None:
                torch.accelerator.synchronize(device)
            else:
                event.synchronize()

    def forget(self) -> None:
        """The next wait is for idle devices; called when something else than an update wrote to them."""
        with self._lock:
            self._events.clear()


def accelerators(devices: Iterable[torch.device]) -> set[torch.device]:
    """Those of `devices` whose work runs behind the host's back."""
    return {device for device in devices if device.type not in ("cpu", "meta")}


def synchronize(devices: Iterable[torch.device]) -> None:
    """Waits until `devices` have done all that was asked of them."""
    for device in accelerators(devices):
        torch.accelerator.synchronize(device)
