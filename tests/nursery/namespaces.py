"""Network namespaces of this host's processes."""

from __future__ import annotations

import ctypes

HOME = "/proc/self/ns/net"


def enter(namespace: int) -> None:
    """Moves the calling thread, and what it starts from now on, into a namespace given by a descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns failed")
