"""Threads that stage give way to training; the process they are in does not."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from lastgood.workers import priority

_IOPRIO_GET = {"x86_64": 252, "aarch64": 31, "ppc64le": 274, "s390x": 283}


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def io_priority() -> int:
    number = ctypes.c_long(_IOPRIO_GET[platform.machine()])
    return ctypes.CDLL(None, use_errno=True).syscall(number, 1, threading.get_native_id())


def in_a_thread(look: Callable[[], int]) -> int:
    """What a thread with low priority sees of itself."""
    with ThreadPoolExecutor(1, initializer=priority.lower_this_thread) as pool:
        return pool.submit(look).result()


def test_only_the_thread_itself_is_lowered_for_the_cpu() -> None:
    before = niceness()
    assert in_a_thread(niceness) == min(19, before + priority.NICE_STEPS)
    assert niceness() == before


@pytest.mark.skipif(platform.machine() not in _IOPRIO_GET, reason="the system call's number is not known here")
def test_only_the_thread_itself_is_lowered_for_the_disk() -> None:
    before = io_priority()
    assert before != priority.IO_PRIORITY and in_a_thread(io_priority) == priority.IO_PRIORITY
    assert io_priority() == before


def test_a_priority_that_may_not_be_lowered_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    before = niceness()
    with caplog.at_level(logging.DEBUG, "lastgood.stager"):
        assert in_a_thread(niceness) == before
    assert [record.levelname for record in caplog.records] == ["DEBUG"] and "not permitted" in caplog.text


def test_an_unknown_machine_keeps_its_disk_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert in_a_thread(niceness) == min(19, niceness() + priority.NICE_STEPS)
