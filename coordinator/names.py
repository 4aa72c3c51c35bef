"""Names of lastgood's actors in a Ray cluster. All live in one namespace, so that any job finds them."""

from __future__ import annotations

NAMESPACE = "lastgood"
DRIVER_ROLE = "trainer"  # of the process that called attach
STEP_CALLS = ("end_step", "before_update")  # what a driver asks at every step
_MEMBERS_OF = "the members of "


def coordinator_name(run: str) -> str:
    """The run's coordinator."""
    return f"coordinator:{run}"


def stager_prefix(run: str) -> str:
    """What the names of all stagers of a run begin with (run names hold no colon)."""
    return f"stager:{run}:"


def stager_name(run: str, ray_node_id: str) -> str:
    """The run's stager on one Ray node."""
    return f"{stager_prefix(run)}{ray_node_id}"


def driver_of_led(role: str) -> str:
    """RoleDeclaration.driver of a role whose members lead; each role has another, so the next one takes its place."""
    return f"{_MEMBERS_OF}{role}"


def is_led(driver: str) -> bool:
    """Whether a RoleDeclaration.driver says that the role's own members lead."""
    return driver.startswith(_MEMBERS_OF)
