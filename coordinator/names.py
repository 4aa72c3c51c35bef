"""Names of lastgood's actors in a Ray cluster. All live in one namespace, so that any job finds them."""

from __future__ import annotations

NAMESPACE = "lastgood"
DRIVER_ROLE = "trainer"  # of the process that called attach
MEMBERS_LEAD = "the members"  # RoleDeclaration.driver of every role of a member-led run


def coordinator_name(run: str) -> str:
    """The run's coordinator."""
    return f"coordinator:{run}"


def stager_prefix(run: str) -> str:
    """What the names of all stagers of a run begin with (run names hold no colon)."""
    return f"stager:{run}:"


def stager_name(run: str, ray_node_id: str) -> str:
    """The run's stager on one Ray node."""
    return f"{stager_prefix(run)}{ray_node_id}"
