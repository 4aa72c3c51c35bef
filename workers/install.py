"""How an agent comes into a process: through `handle.__ray_call__`, which works on actors of any class.

`where` and `install` run inside the user's actor, with its instance as first argument. Nothing of the user's class is
changed; the state function and, if given, the rank function are called with the instance.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch.distributed

from ..coordinator.messages import MemberInfo
from ..storage.errors import MembershipError, UsageError
from .agent import Agent
from .member import Member
from .ray_link import RayStagerLink

StateFunction = Callable[[Any], Mapping[str, Any]]
RankFunction = Callable[[Any], "tuple[int, int]"]  # -> (rank, world size)

_agents: dict[str, Agent] = {}  # one per run in this process
_agents_lock = threading.Lock()


@dataclass(frozen=True)
class InstallOrder:
    """What `install` needs; crosses to the actor by value."""

    run: str
    role: str
    membership: str
    state: StateFunction
    rank: RankFunction | None
    alone: bool  # the only handle of its role: rank 0 of 1 unless the process knows better
    hold_limit_s: float


def where(_instance: Any) -> tuple[str, int]:
    """(Ray node id, pid) of this actor."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


def install(instance: Any, order: InstallOrder) -> MemberInfo:
    """Makes this process a member of the run. Raises UsageError or MembershipError naming what is wrong."""
    rank, world_size = _rank_of(instance, order)
    state = order.state(instance)
    if not isinstance(state, Mapping) or not state:
        raise UsageError(
            f"the state function of role {order.role} returned {type(state).__name__}; it must return a non-empty dict "
            "from component names to the objects that hold the state, such as {'model': worker.model}.",
            role=order.role,
        )
    member = Member.of(order.role, rank, world_size, state, hold_limit_s=order.hold_limit_s)
    return agent_of(order.run).add(member, order.membership)


def agent_of(run: str) -> Agent:
    """This process's agent for a run; made at the first call."""
    with _agents_lock:
        if not _agents:
            atexit.unregister(leave_all)
            atexit.register(leave_all)  # after Ray registered its own, so it runs before Ray is shut down
        if run not in _agents:
            _agents[run] = Agent(run, RayStagerLink(run, ray.get_runtime_context().get_node_id()))
        return _agents[run]


def leave(run: str) -> None:
    """Ends this process's agent for a run, hooks included. Idempotent."""
    with _agents_lock:
        agent = _agents.pop(run, None)
    if agent is not None:
        agent.close()


def leave_all() -> None:
    """Ends every agent of this process: a thread that waits in Ray while Ray is shut down would spoil the exit code."""
    for run in list(_agents):
        leave(run)


def leave_actor(_instance: Any, run: str) -> None:
    """`leave`, called inside a user's actor."""
    leave(run)


def _rank_of(instance: Any, order: InstallOrder) -> tuple[int, int]:
    """(rank, world size), asked of the process and never taken from the order of a list."""
    if order.rank is not None:
        told = order.rank(instance)
        pair = tuple(told) if isinstance(told, (tuple, list)) else ()
        if len(pair) != 2 or not all(isinstance(number, int) and not isinstance(number, bool) for number in pair):
            raise MembershipError(
                f"role {order.role}: rank(worker) returned {told!r}; it takes two ints, (rank, world size), such as "
                "rank=lambda worker: (worker.rank, 4). Nothing is saved for this role.",
                role=order.role,
            )
        return pair
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world_size = getattr(instance, "rank", None), getattr(instance, "world_size", None)
    if isinstance(rank, int) and isinstance(world_size, int):
        return rank, world_size
    if os.environ.get("RANK", "").isdigit() and os.environ.get("WORLD_SIZE", "").isdigit():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if order.alone:
        return 0, 1
    raise MembershipError(
        f"role {order.role}: process {os.getpid()} does not know its rank (torch.distributed is not initialised, the "
        "actor has no `rank` and `world_size`, the environment has no RANK and WORLD_SIZE). Call add_members after "
        "the process group is up, or pass rank=lambda worker: (rank, world_size).",
        role=order.role,
    )
