"""SIGTERM saves first, whatever the main thread does, and then goes where it would have gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import hashlib, os, signal, sys, threading, time
from pathlib import Path
from lastgood.client import sigterm
here = Path(sys.argv[1])
def save():
    (here / "saving").touch()
    while (here / "slow").exists():
        time.sleep(0.01)
    with (here / "saved").open("a") as file:
        file.write("x")
"""
WAIT = """
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


class Child:
    """A process that runs a script; `here` is its directory."""

    def __init__(self, here: Path, script: str) -> None:
        self.here = here
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + script, str(here)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def term(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        try:
            code = self.process.wait(30)
        finally:
            self.process.kill()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.said = self.process.stdout.read()
        self.process.stdout.close()
        self.process.stderr.close()
        return code

    def saves(self) -> int:
        place = self.here / "saved"
        return len(place.read_text()) if place.exists() else 0

    def until(self, name: str) -> None:
        while not (self.here / name).exists():
            assert self.process.poll() is None


def test_the_default_ends_the_process_after_the_save(tmp_path: Path) -> None:
    child = Child(tmp_path, "assert sigterm.save_on_sigterm('run', save)" + WAIT)
    child.term()
    assert (child.end(), child.saves()) == (-signal.SIGTERM, 1)


def test_the_handler_from_before_is_called_after_the_save(tmp_path: Path) -> None:
    script = """
def old(number, frame):
    print("saved" if (here / "saved").exists() else "not saved", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, old)
sigterm.save_on_sigterm("run", save)
"""
    child = Child(tmp_path, script + WAIT)
    child.term()
    assert (child.end(), child.said, child.saves()) == (7, "saved\n", 1)


def test_it_saves_while_the_main_thread_is_in_a_call_that_does_not_come_back(tmp_path: Path) -> None:
    script = """
sigterm.LEAVE_S = 0.2
sigterm.save_on_sigterm("run", save)
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"a long call", b"without a look at signals", 2**31 - 1)
"""
    child = Child(tmp_path, script)
    child.term()
    assert (child.end(), child.saves()) == (128 + signal.SIGTERM, 1)


def test_a_second_signal_does_not_wait_for_the_save(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    child = Child(tmp_path, "sigterm.save_on_sigterm('run', save)" + WAIT)
    child.term()
    child.until("saving")
    child.term()
    assert (child.end(), child.saves()) == (-signal.SIGTERM, 0)


def test_a_save_that_fails_does_not_keep_the_process(tmp_path: Path) -> None:
    child = Child(tmp_path, "sigterm.save_on_sigterm('run', lambda: 1 / 0)" + WAIT)
    child.term()
    assert child.end() == -signal.SIGTERM


def test_every_run_is_saved_and_a_closed_one_is_not(tmp_path: Path) -> None:
    script = "[sigterm.save_on_sigterm(name, save) for name in ('a', 'b', 'c')]; sigterm.forget('b')"
    child = Child(tmp_path, script + WAIT)
    child.term()
    assert (child.end(), child.saves()) == (-signal.SIGTERM, 2)


def test_a_run_that_is_attached_again_is_saved_once_and_by_the_newest(tmp_path: Path) -> None:
    script = "sigterm.save_on_sigterm('run', lambda: 1 / 0); sigterm.save_on_sigterm('run', save)"
    child = Child(tmp_path, script + WAIT)
    child.term()
    assert (child.end(), child.saves()) == (-signal.SIGTERM, 1)


def test_with_the_last_run_the_handler_from_before_is_back(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
sigterm.save_on_sigterm("run", save)
sigterm.forget("run")
assert signal.set_wakeup_fd(-1) == -1
"""
    child = Child(tmp_path, script + WAIT)
    child.term()
    assert (child.end(), child.saves()) == (9, 0)


def test_an_event_loop_that_owns_the_wakeup_descriptor_keeps_it(tmp_path: Path) -> None:
    script = """
import socket
ours, theirs = socket.socketpair()
theirs.setblocking(False)
signal.set_wakeup_fd(theirs.fileno())
sigterm.save_on_sigterm("run", save)
assert signal.set_wakeup_fd(theirs.fileno()) == theirs.fileno()
"""
    child = Child(tmp_path, script + WAIT)
    child.term()
    assert (child.end(), child.saves()) == (-signal.SIGTERM, 1)


LOOP = """
import asyncio
async def loop_that_handles_a_signal(when_it_does):
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
    when_it_does()
    await asyncio.sleep(0 if when_it_does is over else 60)
def over():
    pass
"""


@pytest.mark.parametrize("when", ["over", "running"])
def test_an_event_loop_that_takes_the_wakeup_descriptor_later_does_not_swallow_it(tmp_path: Path, when: str) -> None:
    script = f"""{LOOP}
sigterm.save_on_sigterm("run", save)
asyncio.run(loop_that_handles_a_signal({"over" if when == "over" else 'lambda: print("ready", flush=True)'}))
"""
    child = Child(tmp_path, script + WAIT)
    child.term()
    assert (child.end(), child.saves()) == (-signal.SIGTERM, 1)


def test_a_second_signal_does_not_wait_for_the_save_either_where_only_the_handler_sees_it(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    script = f"""{LOOP}
sigterm.save_on_sigterm("run", save)
asyncio.run(loop_that_handles_a_signal(over))
"""
    child = Child(tmp_path, script + WAIT)
    child.term()
    child.until("saving")
    child.term()
    assert (child.end(), child.saves()) == (-signal.SIGTERM, 0)


def test_a_loop_that_took_the_descriptor_keeps_it_when_the_last_run_is_closed(tmp_path: Path) -> None:
    script = """
import socket
ours, theirs = socket.socketpair()
theirs.setblocking(False)
sigterm.save_on_sigterm("run", save)
signal.set_wakeup_fd(theirs.fileno())
sigterm.forget("run")
print("kept" if signal.set_wakeup_fd(-1) == theirs.fileno() else "lost", flush=True)
"""
    child = Child(tmp_path, script)
    assert child.said == "kept"
    child.end()


@pytest.mark.parametrize("before", ["signal.SIG_DFL", "lambda *_: sys.exit(9)"], ids=["default", "handler"])
def test_a_signal_during_the_close_of_the_run_still_ends_the_process(tmp_path: Path, before: str) -> None:
    (tmp_path / "slow").touch()
    script = f"""
signal.signal(signal.SIGTERM, {before})
sigterm.save_on_sigterm("run", save)
print("ready", flush=True)
while not (here / "saving").exists():
    time.sleep(0.01)
sigterm.forget("run")
(here / "slow").unlink()
while True:
    time.sleep(0.01)
"""
    child = Child(tmp_path, script)
    child.term()
    assert (child.end(), child.saves()) == (-signal.SIGTERM if before == "signal.SIG_DFL" else 9, 1)


def test_a_later_handler_that_calls_ours_ends_the_process_after_the_save(tmp_path: Path) -> None:
    script = """
sigterm.save_on_sigterm("run", save)
before = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda number, frame: before(number, frame))
"""
    child = Child(tmp_path, script + WAIT)
    child.term()
    assert (child.end(), child.saves()) == (-signal.SIGTERM, 1)


def test_a_later_handler_that_calls_ours_after_the_close_takes_the_old_way(tmp_path: Path) -> None:
    script = """
sigterm.save_on_sigterm("run", save)
before = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda number, frame: before(number, frame))
sigterm.forget("run")
"""
    child = Child(tmp_path, script + WAIT)
    child.term()
    assert (child.end(), child.saves()) == (-signal.SIGTERM, 0)


def test_a_handler_that_the_user_installs_later_has_the_last_word(tmp_path: Path) -> None:
    script = """
sigterm.save_on_sigterm("run", save)
def mine(number, frame):
    (here / "mine").touch()
signal.signal(signal.SIGTERM, mine)
print("ready", flush=True)
while not ((here / "saved").exists() and (here / "mine").exists()):
    time.sleep(0.01)
sys.exit(3)
"""
    child = Child(tmp_path, script)
    child.term()
    assert (child.end(), child.saves()) == (3, 1)


def test_a_forked_child_lets_go_of_nothing_that_the_parent_uses(tmp_path: Path) -> None:
    """A Ray handle that ended in the child spoke to the cluster over the parent's connection, and broke that."""
    script = """
class Save:
    def __call__(self):
        pass
    def __del__(self):
        (here / "let go").touch()
sigterm.save_on_sigterm("run", Save())
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
print("let go" if (here / "let go").exists() else "kept", flush=True)
"""
    child = Child(tmp_path, script + WAIT.replace('print("ready", flush=True)', ""))
    assert child.said == "kept"
    child.term()
    assert child.end() == -signal.SIGTERM


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_a_signal_to_a_forked_child_is_not_taken_for_ours(tmp_path: Path, how: str) -> None:
    fork = """
pid = os.fork()
if pid == 0:
    while True:
        time.sleep(0.01)
"""
    multi = """
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
process.start()
pid = process.pid
"""
    script = f"""
sigterm.save_on_sigterm("run", save)
{fork if how == "os.fork" else multi}
time.sleep(0.2)
os.kill(pid, signal.SIGTERM)
_, status = os.waitpid(pid, 0)
assert os.WTERMSIG(status) == signal.SIGTERM, status
print("gone", flush=True)
(here / "go").exists()
""" + WAIT.replace('print("ready", flush=True)', "")
    child = Child(tmp_path, script)
    assert (child.said, child.saves()) == ("gone", 0)
    child.term()
    assert (child.end(), child.saves()) == (-signal.SIGTERM, 1)
