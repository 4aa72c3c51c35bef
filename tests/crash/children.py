"""Runs pieces of the story in forked children, which may be killed at any operation, and hears what they told.

A fork of this warm process takes a millisecond where a new interpreter takes half a second. It must have one thread.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import struct
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tests.crash import cluster, plants, story
from tests.crash.cluster import Place
from tests.crash.journal import Journal, Mark
from tests.crash.operations import Layer, Operation, Perform

ENDS_S = 60.0  # for a thread whose pool was shut down
_LENGTH = struct.Struct("<Q")


@dataclass
class Heard:
    """What a child told before it ended."""

    killed: bool = False
    marks: list[Mark] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)  # see operations.Layer
    audited: list[str] = field(default_factory=list)
    answer: Any = None  # of other work than a telling
    trouble: str | None = None


@dataclass(frozen=True)
class Telling:
    """One telling of a chapter. `kill_after`: the number of operations after which the child dies; with `half`, the
    last of them is a write of which only the first half is done. `plant` names a planted bug."""

    chapter: str
    seed: int = 1
    again: bool = False
    kill_after: int | None = None
    half: bool = False
    plant: str | None = None


def tell(telling: Telling, place: Place) -> Heard:
    """Tells a chapter in a child on the disks of `place`."""
    return in_child(lambda send: _tell(telling, place, send))


def _tell(telling: Telling, place: Place, send: Callable[[Any], None]) -> None:
    done: list[Operation] = []

    def watch(operation: Operation, perform: Perform, half: Perform | None) -> Any:
        if telling.half and len(done) + 1 == telling.kill_after and half is not None:
            half()
            _die()
        answer = perform()
        done.append(operation)
        if len(done) == telling.kill_after:
            _die()
        return answer

    cluster.steady(telling.seed)
    plants.plant(telling.plant)
    layer = Layer(place.root, watch)
    layer.install()
    if telling.kill_after is None:
        layer.audit()
    story.tell(telling.chapter, place, Journal(send, lambda: len(done)), again=telling.again)
    send(("operations", done))
    send(("tried", layer.tried))
    send(("audited", layer.audited))


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()


def in_child(work: Callable[[Callable[[Any], None]], None]) -> Heard:
    """Forks; the child does its work and says what it likes; answers all that it said, however it ended."""
    for thread in threading.enumerate():  # those of a coordinator that has stopped may still be on their way out
        if thread is not threading.current_thread():
            thread.join(ENDS_S)
    assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    reading, writing = os.pipe()
    write = os.write
    pid = os.fork()
    if pid == 0:
        gc.disable()  # it would touch, and so copy, every page of the parent's
        code = 1
        try:
            os.close(reading)
            os.environ.pop("LASTGOOD_FAILPOINTS", None)
            work(lambda what: _send(write, writing, what))
            code = 0
        except BaseException:  # noqa: BLE001 - told to the parent
            _send(write, writing, traceback.format_exc())
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = memoryview(pipe.read())
    _, status = os.waitpid(pid, 0)
    heard = Heard(killed=os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
    while len(data) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        _take_in(heard, pickle.loads(data[_LENGTH.size : end]))  # noqa: S301 - our own child wrote it
        data = data[end:]
    if status != 0 and not heard.killed and heard.trouble is None:
        heard.trouble = f"the child ended with status {status}"
    return heard


def _send(write: Callable[[int, bytes], int], fd: int, what: Any) -> None:
    data = pickle.dumps(what)
    data = _LENGTH.pack(len(data)) + data
    while data:
        data = data[write(fd, data) :]


def _take_in(heard: Heard, what: Any) -> None:
    if isinstance(what, Mark):
        heard.marks.append(what)
    elif isinstance(what, str):
        heard.trouble = what
    else:
        setattr(heard, what[0], what[1])
