"""Who the run consists of and who is here: declared roles against registered members, node by node.

Pure bookkeeping of the protocol core. The rule: a save needs every rank 0..W-1 of every declared role exactly once,
with all components, registered by the add_members call that declared the role. `problems` says in sentences what is
missing; nothing is guessed or taken from the order of a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..storage.fingerprint import merged
from .messages import Blame, MemberId, MemberInfo, MemberReport, NodeSnapshot, RoleDeclaration


@dataclass(frozen=True)
class Window:
    """An open quiescent window: every declared member ended `step` with these counts of updates."""

    number: int  # of this window; a step may be opened twice (a run that was rewound)
    step: int
    updates: Mapping[MemberId, int | None]
    processes: Mapping[MemberId, str]  # where each member lived when it reported
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Roster:
    """The complete membership, as a save needs it."""

    roles: tuple[RoleDeclaration, ...]
    members_of: Mapping[str, tuple[MemberId, ...]]  # node -> its members, sorted; only nodes that will hold shards
    processes: Mapping[MemberId, str]  # of every declared member
    pausing: frozenset[str]  # nodes where some component asks for pause/release
    fingerprint: Mapping[str, Any]  # JSON values by name, of all members together
    weights: frozenset[tuple[MemberId, str]] = frozenset()  # components that an optimizer changes


class Membership:
    """The declared roles, and the members registered on each node."""

    def __init__(self) -> None:
        self.declarations: dict[str, RoleDeclaration] = {}
        self.by_node: dict[str, dict[MemberId, MemberInfo]] = {}
        self._declared_here: set[str] = set()  # roles declared to this coordinator itself, not learnt from a stager
        self._roster: Roster | None = None
        self._problems: tuple[str, ...] | None = None

    def declare(self, declaration: RoleDeclaration) -> bool:
        """Takes a role as add_members declared it. Answers whether anything changed.

        The first role of another driver drops all that the driver before it declared: it may need fewer.
        """
        changed = self.declarations.get(declaration.role) != declaration
        self._drop_other_drivers(declaration.driver)
        self._declared_here.add(declaration.role)
        self.declarations[declaration.role] = declaration
        self._forget()
        return changed

    def learn(self, declarations: Iterable[RoleDeclaration]) -> None:
        """Takes declarations that a stager kept over a coordinator restart; one made to this coordinator stands.

        Where stagers differ (one missed a later add_members, or a new driver), the one that more members registered
        for wins.
        """
        found = tuple(declarations)
        others = [role for role in self.declarations.values() if role.driver not in {role.driver for role in found}]
        if found and others:
            if self._declared_here or self._registered(*found) <= self._registered(*others):
                return
            self._drop_other_drivers(found[0].driver)
        for declaration in found:
            known = self.declarations.get(declaration.role)
            if declaration.role in self._declared_here or known == declaration:
                continue
            if known is None or self._registered(declaration) > self._registered(known):
                self.declarations[declaration.role] = declaration
                self._forget()

    def _drop_other_drivers(self, driver: str) -> None:
        self.declarations = {role: known for role, known in self.declarations.items() if known.driver == driver}
        self._declared_here &= self.declarations.keys()
        self._forget()

    def _registered(self, *declarations: RoleDeclaration) -> int:
        """Members that registered for these declarations."""
        wanted = {(declaration.role, declaration.membership) for declaration in declarations}
        return sum(
            (info.member.role, info.membership) in wanted
            for members in self.by_node.values()
            for info in members.values()
        )

    def register(self, node: str, members: Iterable[MemberInfo]) -> tuple[MemberId, ...]:
        """Takes all members of a node. Answers those that are gone from it or now live in another process."""
        before = self.by_node.get(node, {})
        after = {info.member: info for info in members}
        if before == after:
            return ()
        self.by_node[node] = after
        self._forget()
        return tuple(
            member
            for member, info in before.items()
            if member not in after
            or (after[member].process, after[member].membership) != (info.process, info.membership)
        )

    def drop(self, member: MemberId) -> str | None:
        """A member's process is gone. Answers the node it was on."""
        for node, members in self.by_node.items():
            if members.pop(member, None) is not None:
                self._forget()
                return node
        return None

    def gone_of(self, processes: Mapping[MemberId, str]) -> list[MemberId]:
        """Members that are not registered any more, or by another process."""
        now = {m: info.process for members in self.by_node.values() for m, info in members.items()}
        return sorted(member for member, process in processes.items() if now.get(member) != process)

    def node_of(self, member: MemberId) -> str | None:
        """Where a member is registered."""
        return next((node for node, members in self.by_node.items() if member in members), None)

    def members_on(self, node: str) -> tuple[MemberId, ...]:
        """The members that a node hosts, sorted; without those that a later add_members call has replaced.

        A node that is gone keeps the members that it had: they are missed there until they are replaced.
        """
        return tuple(sorted(m for m, info in self.by_node.get(node, {}).items() if self._is_current(info)))

    def _is_current(self, info: MemberInfo) -> bool:
        declaration = self.declarations.get(info.member.role)
        return declaration is None or declaration.membership == info.membership

    def nodes(self) -> tuple[str, ...]:
        """Nodes that host members, sorted."""
        return tuple(sorted(node for node in self.by_node if self.members_on(node)))

    def _forget(self) -> None:
        self._roster = None
        self._problems = None

    def problems(self) -> tuple[str, ...]:
        """What keeps the membership from being complete, one sentence each; empty when it is complete."""
        if self._problems is None:
            self._problems = tuple(self._find_problems())
        return self._problems

    def _find_problems(self) -> Iterable[str]:
        if not self.declarations:
            yield "no role has been declared (add_members, add_driver)"
            return
        hosts: dict[MemberId, list[tuple[str, MemberInfo]]] = {}
        for node, members in self.by_node.items():
            for member, info in members.items():
                declaration = self.declarations.get(member.role)
                if declaration is not None and info.membership == declaration.membership:
                    hosts.setdefault(member, []).append((node, info))
        for role, declaration in sorted(self.declarations.items()):
            missing = [r for r in range(declaration.world_size) if MemberId(role, r) not in hosts]
            if missing:
                shown = ", ".join(f"{role}:{rank}" for rank in missing[:8])
                more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
                yield f"{len(missing)} of {declaration.world_size} members of role {role} are missing: {shown}{more}"
            for member, places in sorted((m, p) for m, p in hosts.items() if m.role == role):
                if len(places) > 1:
                    yield f"member {member} is registered on {' and '.join(sorted(node for node, _ in places))}"
                info = places[0][1]
                if member.rank >= declaration.world_size:
                    yield f"member {member} is beyond the declared world size {declaration.world_size}"
                if info.world_size != declaration.world_size:
                    yield f"member {member} says world size {info.world_size}, declared is {declaration.world_size}"
                if set(info.components) != set(declaration.components):
                    yield _component_problem(member, info.components, declaration.components)
        if not any(declaration.components for declaration in self.declarations.values()):
            yield "no declared role has a component to save"

    def roster(self) -> Roster:
        """The complete membership. Only to be called when `problems()` is empty."""
        if self._roster is None:
            members_of: dict[str, list[MemberId]] = {}
            pausing = set()
            infos: dict[MemberId, MemberInfo] = {}
            for node, members in self.by_node.items():
                for member, info in members.items():
                    declaration = self.declarations.get(member.role)
                    if declaration is None or declaration.membership != info.membership:
                        continue
                    infos[member] = info
                    if declaration.components:
                        members_of.setdefault(node, []).append(member)
                        if info.pausable:
                            pausing.add(node)
            self._roster = Roster(
                roles=tuple(self.declarations[role] for role in sorted(self.declarations)),
                members_of={node: tuple(sorted(members_of[node])) for node in sorted(members_of)},
                processes={member: info.process for member, info in infos.items()},
                pausing=frozenset(pausing),
                fingerprint=_fingerprint(infos),
                weights=frozenset((member, name) for member, info in infos.items() for name in info.weights),
            )
        return self._roster

    def window_problem(
        self, step: int, reports: Mapping[str, NodeSnapshot], failures: Mapping[str, Blame]
    ) -> Blame | dict[MemberId, int | None]:
        """Checks the answers to mark. Answers each member's count of updates, or the first thing that is wrong."""
        for _, blame in sorted(failures.items()):
            return replace(blame, reason=f"the end of step {step} could not be marked: {blame.reason}")
        if problems := self.problems():
            return Blame("window", f"the membership is not complete: {'; '.join(problems)}")
        updates: dict[MemberId, int | None] = {}
        by_role: dict[str, MemberReport] = {}
        for node in sorted(reports):
            for report in reports[node].members:
                member = report.member
                declaration = self.declarations.get(member.role)
                if declaration is None or member not in self.by_node.get(node, {}):
                    continue  # of an earlier add_members call
                if report.step != step:
                    reason = f"member {member} ended step {report.step}, the run says step {step}"
                    return Blame("window", reason, node=node, member=member)
                if set(report.components) != set(declaration.components):
                    reason = _component_problem(member, report.components, declaration.components)
                    return Blame("window", reason, node=node, member=member)
                first = by_role.setdefault(member.role, report)
                if first.updates != report.updates:
                    reason = (
                        f"member {member} counts {report.updates} optimizer updates, "
                        f"{first.member} counts {first.updates}: their states are not of one step"
                    )
                    return Blame("window", reason, node=node, member=member)
                updates[member] = report.updates
        for role, declaration in sorted(self.declarations.items()):
            for rank in range(declaration.world_size):
                member = MemberId(role, rank)
                if member not in updates:
                    reason = f"member {member} did not report the end of step {step}"
                    return Blame("window", reason, node=self.node_of(member), member=member)
        return updates


def _component_problem(member: MemberId, has: Iterable[str], declared: Iterable[str]) -> str:
    lacks, extra = sorted(set(declared) - set(has)), sorted(set(has) - set(declared))
    parts = [f"lacks {', '.join(lacks)}"] if lacks else []
    parts += [f"has undeclared {', '.join(extra)}"] if extra else []
    return f"member {member} {' and '.join(parts)}"


def _fingerprint(infos: Mapping[MemberId, MemberInfo]) -> dict[str, Any]:
    """Of all roles; names carry their role already."""
    by_role: dict[str, list[Mapping[str, Any]]] = {}
    for member in sorted(infos):
        by_role.setdefault(member.role, []).append(infos[member].fingerprint)
    return {name: value for ranks in by_role.values() for name, value in merged(ranks).items()}
