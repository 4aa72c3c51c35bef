"""SIGTERM in the driver: the last finished step is saved before the process ends, also when it comes in a long call.

A signal handler written in Python runs only when the main thread comes back to Python, so it is no help in a call that
takes minutes. The signal's number also goes through `signal.set_wakeup_fd` to a pipe, which a thread of ours reads:
that thread saves. An event loop may take that descriptor away at any time: so the handler writes to the pipe too. When
the saves are over (or their time is), the signal is raised once more and goes where it would have gone without us: to
the handler that was installed before, or to the default, which ends the process. That holds too when the run was closed
meanwhile, and when a handler that was installed later calls ours; one that does not has the last word. A second SIGTERM
from outside goes there at once. Processes forked from this one (data loader workers) get the old handler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger("lastgood")

LEAVE_S = 5.0  # how long the main thread may take to see the signal again before the default is carried out for it
EXIT_CODE = 128 + signal.SIGTERM
HANDLED = 0  # in the pipe beside the numbers of signals: our handler was called; no signal has this number

Save = Callable[[], None]  # saves one run, in its own deadline


class Sigterm:
    """The one handler of this process for all its runs. `add` and `remove` in the main thread."""

    def __init__(self) -> None:
        self._saves: dict[str, Save] = {}
        self._inherited: dict[str, Save] = {}  # of the process that this one was forked from; kept, never called
        self._before: Any = None  # the handler that was installed before ours
        self._pipe: tuple[int, int] | None = None
        self._seen = threading.Event()  # a SIGTERM has come
        self._over = threading.Event()  # the saves are over
        self._left = threading.Event()  # the main thread has taken the old way
        self._ours = threading.Event()  # a SIGTERM that has come was for us to hand on: nobody else will
        os.register_at_fork(after_in_child=self._forked)

    def add(self, run: str, save: Save) -> bool:
        """From now on SIGTERM saves `run` first. False when this is not the main thread: nothing is installed then."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._saves[run] = save
        if self._pipe is None:
            self._install()
        return True

    def remove(self, run: str) -> None:
        """The run is closed. With the last one the handler from before is put back, if ours is still the one."""
        if self._saves.pop(run, None) is None or self._saves:
            return
        if threading.current_thread() is threading.main_thread():
            self._uninstall()

    def _install(self) -> None:
        self._seen, self._over, self._left, self._ours = (threading.Event() for _ in range(4))
        self._pipe = read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(read, True)
        self._before = signal.signal(signal.SIGTERM, self._handle)
        standing = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if standing != -1:  # an event loop owns it: then the handler alone must do
            signal.set_wakeup_fd(standing)
        threading.Thread(target=self._watch, args=(read,), name="lastgood-sigterm", daemon=True).start()

    def _forked(self) -> None:
        """In a forked child: its signals must not be taken for ours.

        Nothing is let go of here: a Ray handle that ends in the child tells the cluster so, over the connection that
        the parent still uses (seen: the parent's next call to Ray never came back).
        """
        if self._pipe is not None:
            self._inherited, self._saves = self._saves, {}
            self._uninstall()

    def _uninstall(self) -> None:
        assert self._pipe is not None
        (_, write), self._pipe = self._pipe, None  # from here on our handler takes the old way
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
            self._ours.set()
        standing = signal.set_wakeup_fd(-1)
        if standing != write:  # an event loop's
            signal.set_wakeup_fd(standing)
        os.close(write)  # the thread reads the end of the pipe and leaves

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread. The first time the thread saves; after that the old way is taken."""
        self._ours.set()
        if self._over.is_set() or self._pipe is None:
            self._left.set()
            self._old_way(number, frame)
        else:
            with contextlib.suppress(BlockingIOError):  # full: the thread has enough to read
                os.write(self._pipe[1], bytes([HANDLED]))

    def _old_way(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        elif self._before is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _watch(self, read: int) -> None:
        arrived = handled = 0  # one signal comes by either way or by both
        with os.fdopen(read, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                arrived += numbers.count(signal.SIGTERM)
                handled += numbers.count(HANDLED)
                if max(arrived, handled) > 0 and not self._seen.is_set():
                    self._seen.set()
                    threading.Thread(target=self._save_all, name="lastgood-emergency", daemon=True).start()
                if max(arrived, handled) > 1 and not self._over.is_set():
                    log.warning("a second SIGTERM: the emergency save is not waited for")
                    self._leave()

    def _save_all(self) -> None:
        saves = list(self._saves.items())
        log.warning("SIGTERM: the last finished step of %s is saved first", ", ".join(run for run, _ in saves))
        threads = [threading.Thread(target=self._save, args=pair, daemon=True) for pair in saves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self._over.is_set():
            self._leave()

    def _save(self, run: str, save: Save) -> None:
        try:
            save()
        except Exception as error:  # noqa: BLE001 - the process ends in any case; the reason must be told
            log.error("the emergency save of run %s failed: %s", run, error)

    def _leave(self) -> None:
        """Raises the signal again; if the main thread does not come back to see it, the default is carried out."""
        if self._over.is_set():
            return
        self._over.set()
        if signal.getsignal(signal.SIGTERM) != self._handle and not self._ours.is_set():
            return  # somebody's own handler has had the signal already
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._left.wait(LEAVE_S) and self._before is signal.SIG_DFL:
            log.warning("the main thread does not come back from its call: the process ends here")
            with contextlib.suppress(Exception):
                logging.shutdown()
            os._exit(EXIT_CODE)


_sigterm = Sigterm()


def save_on_sigterm(run: str, save: Save) -> bool:
    """See Sigterm.add."""
    return _sigterm.add(run, save)


def forget(run: str) -> None:
    """See Sigterm.remove."""
    _sigterm.remove(run)
