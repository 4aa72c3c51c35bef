"""The status of a live run as sentences for people, from Run.status(). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sentences(run: str, status: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """(sentence, whether all is well) for each thing worth telling, the most important first."""
    told = [(f"run {run}, epoch {status.get('epoch')}, store {status.get('store')}", True)]
    if status.get("fenced"):
        told.append((f"another coordinator leads it: {status['fenced']}", False))
    told.append((_newest(status.get("newest")), True))
    told += [(f"fails: {problem}", False) for problem in status.get("membership_problems", ())]
    told += [(f"not heard: node {node}", False) for node in _silent(status)]
    told.append((_members(status), True))
    told.append((_window(status), True))
    front = status.get("foreground")
    if front:
        told.append((f"saving: {_attempt(front)}", True))
    for attempt in status.get("background", ()):
        told.append((f"beside it: {_attempt(attempt)}", not attempt.get("blame")))
    for waiting in status.get("waiting", ()):
        left_s = waiting["seconds_left"]
        told.append((f"waits: {waiting['kind']} save ({waiting['reason']}), {left_s:.0f} s left", True))
    if status.get("failures_in_a_row"):
        told.append((f"{status['failures_in_a_row']} saves in a row have failed; `lastgood story` tells why", False))
    told += [(f"alarm: {alarm}", False) for alarm in status.get("alarms", ())]
    told += [(f"a defect of lastgood: {fault}", False) for fault in status.get("faults", ())]
    return told


def _newest(newest: Mapping[str, Any] | None) -> str:
    if newest is None:
        return "nothing is committed yet"
    return f"newest checkpoint: step {newest['step']}, {newest['state']} (attempt {newest['attempt']})"


def _silent(status: Mapping[str, Any]) -> list[str]:
    return sorted({*status.get("nodes_lost", ()), *status.get("nodes_silent", ())})


def _members(status: Mapping[str, Any]) -> str:
    roles = status.get("roles") or {}
    there = ", ".join(f"{count} of {role}" for role, count in roles.items()) or "none yet"
    missing = ", ".join(map(str, status.get("missing", ())))
    nodes = len(status.get("nodes_heard", ()))
    return f"members: {there}, on {nodes} nodes" + (f"; missing: {missing}" if missing else "")


def _window(status: Mapping[str, Any]) -> str:
    step = status.get("window")
    told = "a save can be taken only after the next end_step" if step is None else f"step {step} can be saved right now"
    held = status.get("in_memory")
    if held is not None:
        told += f"; step {held} lies in memory"
    led = status.get("member_led")
    if led:
        told += f"; the ranks may go on to step {led['granted']}"
        told += f", absent: {', '.join(led['absent'])}" if led["absent"] else ""
    return told


def _attempt(attempt: Mapping[str, Any]) -> str:
    tag = f", tag {attempt['tag']}" if attempt.get("tag") else ""
    nbytes = sum((attempt.get("bytes") or {}).values())
    size = f", {nbytes / 1e6:,.0f} MB" if nbytes else ""
    blame = f": {attempt['blame']}" if attempt.get("blame") else ""
    what = f"{attempt['kind']}{tag}{size}, attempt {attempt['attempt']}"
    return f"step {attempt['step']} is {attempt['phase']} ({what}){blame}"
