"""How the ranks of a member-led run come together in the coordinator: joining.py decides, this waits and declares.

A part of member_led.py, on the service's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..storage.errors import UsageError
from ..storage.ids import ulid
from .joining import Joining
from .messages import RankClaim, RoleDeclaration
from .names import driver_of_led

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("lastgood.coordinator")

POLL_S = 0.1
GONE_S = 15.0  # how long a join waits for the processes before it to be gone


class Gathering:
    """All roles that gather. `roles`: the declared ones whose members lead."""

    def __init__(self, service: Service, roles: Callable[[], Mapping[str, RoleDeclaration]]) -> None:
        self._service = service
        self._roles = roles
        self._joining: dict[str, Joining] = {}  # by role

    async def join(self, claim: RankClaim, wait_s: float) -> str | None:
        """A rank claims its place; again until it is told the membership. None: not all are here after `wait_s`.

        Raises MembershipError (ranks missing by register_deadline_s, doubled, or not alike), UsageError when other
        live processes lead the run.
        """
        joining = self._joining.get(claim.role)
        over = joining is not None and (joining.membership is not None or joining.refusal is not None)
        if joining is None or (over and claim.claim_id not in joining.places):
            joining = Joining(claim.role, self._service.options.register_deadline_s)
            self._joining[claim.role] = joining
        until = time.monotonic() + wait_s
        joining.take(claim, time.monotonic())
        while joining.membership is None:
            if joining.whole:
                await self._complete(joining)
            if joining.refusal is not None:
                raise joining.refusal
            if joining.membership is None:
                if time.monotonic() > until:
                    return None
                await asyncio.sleep(POLL_S)
        return joining.membership

    async def _complete(self, joining: Joining) -> None:
        """All ranks are here: declares the role once nobody else leads the run."""
        await self._service.nodes.refresh()
        if joining.membership is not None or joining.refusal is not None or not joining.whole:
            return
        others = self._others(joining)
        if others and not self._service.options.takeover:
            began_s = max(place.first_s for place in joining.places.values())
            if time.monotonic() - began_s > GONE_S:
                joining.refusal = UsageError(
                    f"run {self._service.options.run} is led by other live processes ({', '.join(others[:4])}). "
                    "Nothing was touched. A member-led run has one role: end them first, choose another run name for "
                    f"role {joining.role}, let a driver lead several roles, or pass takeover=True.",
                    run=self._service.options.run,
                )
            return
        claim = next(iter(joining.places.values())).claim
        joining.membership = ulid()
        log.info("role %s: all %d ranks have joined", joining.role, claim.world_size)
        driver = driver_of_led(joining.role)
        declaration = RoleDeclaration(joining.role, claim.world_size, claim.components, joining.membership, driver)
        await self._service.declare(declaration)

    def _others(self, joining: Joining) -> list[str]:
        """Live members that would be put out: of this role, of another that leads itself, of a run with a driver."""
        roles = {joining.role, *self._service.declared}
        return [
            f"{info.member} pid {info.pid}"
            for infos in self._service.nodes.members.values()
            for info in infos
            if info.process not in joining.processes and info.member.role in roles
        ]

    async def joined(self, role: str, membership: str, wait_s: float) -> tuple[str, ...] | None:
        """Members of the role that the coordinator does not see yet, after `wait_s` at most; none: the role is whole.

        None when this membership no longer counts (the coordinator was restarted meanwhile): join again.
        """
        until = time.monotonic() + wait_s
        while True:
            joining, declared = self._joining.get(role), self._roles().get(role)
            if declared is None or declared.membership != membership:
                return None
            if joining is not None and joining.membership is None and joining.places:
                return None
            absent = tuple(name for name in self._service.nodes.missing().members if name.startswith(f"{role}:"))
            if not absent or time.monotonic() > until:
                return absent
            await asyncio.sleep(POLL_S)
            await self._service.nodes.refresh()
