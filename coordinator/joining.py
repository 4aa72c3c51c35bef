"""Joining: the ranks of one role of a member-led run come together. Pure; time comes in as an argument.

Every rank claims its place and renews the claim until all ranks have one; then all are told the same membership id.
A claim that is not renewed is dropped: its process died. Two processes that both keep claiming one rank are an error
that names both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..storage.errors import LastgoodError, MembershipError
from .messages import RankClaim

CLAIM_S = 10.0  # a claim that was not renewed for so long is dropped


@dataclass
class _Place:
    """One process's claim to one rank."""

    claim: RankClaim
    first_s: float
    last_s: float


@dataclass
class Joining:
    """The gathering of one role, from its first claim until every claimant has been told how it ended."""

    role: str
    deadline_s: float
    places: dict[str, _Place] = field(default_factory=dict)  # by claim id
    membership: str | None = None  # once all are there
    refusal: LastgoodError | None = None
    _refused: dict[str, LastgoodError] = field(default_factory=dict)  # by claim id

    def take(self, claim: RankClaim, now_s: float) -> None:
        """Takes a claim in, or its renewal. Raises MembershipError when it, or the gathering as a whole, cannot be."""
        refusal = self.refusal or self._refused.get(claim.claim_id)
        if refusal is not None:
            raise refusal
        self.places = {
            key: place for key, place in self.places.items() if now_s - place.last_s <= CLAIM_S or key == claim.claim_id
        }
        place = self.places.setdefault(claim.claim_id, _Place(claim, now_s, now_s))
        place.last_s = now_s
        for other in list(self.places.values()):
            if other is not place and (error := self._misfit(place, other)) is not None:
                for each in (claim, other.claim):
                    self._refused[each.claim_id] = error
                    del self.places[each.claim_id]
                raise error
        if now_s - place.first_s > self.deadline_s and not self.whole:
            del self.places[claim.claim_id]
            raise self._late(claim)

    def _misfit(self, mine: _Place, other: _Place) -> MembershipError | None:
        """Why two claims cannot stand together; told to both, once both have shown that they live."""
        if min(mine.last_s, other.last_s) <= max(mine.first_s, other.first_s):
            return None
        a, b = mine.claim, other.claim
        if a.world_size != b.world_size:
            return MembershipError(
                f"role {self.role}: rank {a.rank} ({a.who}) says world size {a.world_size}, rank {b.rank} ({b.who}) "
                f"says {b.world_size}. Nothing is saved for this role. Give every rank the same world_size.",
                role=self.role,
            )
        if a.components != b.components:
            return MembershipError(
                f"role {self.role}: rank {a.rank} ({a.who}) names components {list(a.components)}, rank {b.rank} "
                f"({b.who}) names {list(b.components)}. Nothing is saved for this role. Every member of a role has the "
                "same ones.",
                role=self.role,
            )
        if a.rank == b.rank:
            return MembershipError(
                f"two live processes say that they are {self.role}:{a.rank}: {a.who} and {b.who}. Nothing is saved for "
                "this role. Give each process its own rank.",
                role=self.role,
                rank=a.rank,
            )
        return None

    def _late(self, claim: RankClaim) -> MembershipError:
        there = {claim.rank, *(place.claim.rank for place in self.places.values())}
        missing = sorted(set(range(claim.world_size)) - there)
        names = ", ".join(f"{self.role}:{rank}" for rank in missing)
        return MembershipError(
            f"{self.role}:{claim.rank} waited {self.deadline_s:.0f} s (register_deadline_s) for {names}, which did not "
            f"join. Nothing is saved for this role. Does every one of the {claim.world_size} ranks call "
            "lastgood.member()?",
            role=self.role,
            missing=missing,
        )

    @property
    def whole(self) -> bool:
        """Whether every rank has exactly one claimant, and all are alike."""
        claims = [place.claim for place in self.places.values()]
        alike = len({(claim.world_size, claim.components) for claim in claims}) == 1
        return alike and sorted(claim.rank for claim in claims) == list(range(claims[0].world_size))

    @property
    def processes(self) -> set[str]:
        """Ids of the processes that claim a rank."""
        return {place.claim.process for place in self.places.values()}
