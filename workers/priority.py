"""Low priority for the threads that stage: they take what training leaves. The rule: of a thread, never of a process.

The stager's event loop answers coordinator and agents and stays as quick as it was. What cannot be lowered (a sandbox,
another kernel) is left as it is: a save that competes with training is better than no save.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading

NICE_STEPS = 5  # a third of the CPU that a trainer's thread gets on a core they share; 19 would miss deadlines there
IO_PRIORITY = 2 << 13 | 7  # the last of the best-effort class; the idle class may wait for ever
_THREAD = 1  # IOPRIO_WHO_PROCESS, which is a thread
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "s390x": 282}  # libc has no function for it

log = logging.getLogger("lastgood.stager")


def lower_this_thread() -> None:
    """Gives way to other threads from now on, for CPU and disk. Never raises."""
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE_STEPS)
        _set_io_priority(thread)
    except (OSError, AttributeError) as error:
        log.debug("thread %d stages at the priority it had: %s", thread, error)


def _set_io_priority(thread: int) -> None:
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        raise OSError(f"no number of ioprio_set is known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), _THREAD, thread, IO_PRIORITY) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
