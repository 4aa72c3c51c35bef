"""Versions that go into every manifest, and that a coordinator tells of itself."""

from __future__ import annotations

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Name -> version, of Python and of the packages here that a checkpoint depends on."""
    found = {"python": platform.python_version()}
    for name in ("lastgood", "ray", "torch", "numpy", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
