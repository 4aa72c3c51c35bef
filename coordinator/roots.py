"""Where a run may keep its checkpoints: the rules for store and staging roots, and the staging template.

A root must mean the same directory to every process on every node: absolute, on a file system, not inside the
temporary directories that Ray makes anew for each session and node. URLs are redacted before they are shown.
"""

from __future__ import annotations

import difflib
import os
import posixpath
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from ..storage.errors import OptionsError

PLACEHOLDERS = ("{label:NAME}", "{env:NAME}", "{hostname}", "{node_ip}")

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:/*)\S*@")  # to the last @, slashes forgotten or not
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?#'\"]*)[?#][^\s'\"]*")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_RAY_SESSION = re.compile(r"(^|/)session_(latest|\d{4}-\d{2}-\d{2}_[^/]*)(/|$)")
_RAY_DEFAULT = "/tmp/ray"


def redact(text: str) -> str:
    """`text` with the user part and the query of every URL in it replaced by `***`: keys never reach a log."""
    return _QUERY.sub(r"\1?***", _USERINFO.sub(r"\1***@", text))


def shown(value: Any) -> str:
    """A value as an error may show it: redacted, at most 120 characters."""
    text = redact(repr(value))
    return text if len(text) <= 120 else text[:117] + "..."


def check_root(option: str, value: str) -> str:
    """The plain absolute path that `value` (a path or file:// URL) names; what `option` is called in errors.

    Raises OptionsError for a relative path, another URL scheme, a remote file:// host, or a directory of Ray's.
    """
    path = plain_path(option, value)
    if not path.startswith("/"):
        home = " (~ is not expanded: it differs between users and nodes)" if path.startswith("~") else ""
        raise OptionsError(
            f"{option} is {shown(value)}, which is relative{home}: on every node a Ray process starts in another"
            f" temporary directory, so it would mean another place to each rank. Give an absolute path.",
            option=option,
        )
    path = posixpath.normpath(path).replace("//", "/")
    if path == "/":
        raise OptionsError(f"{option} is the root of the file system. Name a directory below it.", option=option)
    _refuse_ray(option, value, path, _RAY_DEFAULT)
    return path


def check_outside_session(option: str, path: str, session_dir: str) -> None:
    """Raises OptionsError when `path` lies in the live Ray session's directory (the caller asks Ray for it)."""
    _refuse_ray(option, path, path, session_dir)


def check_apart(run: str, store: str, staging: str) -> None:
    """Raises OptionsError when the run's directory in the store and the one in staging are the same or nested."""
    at_rest, staged = (posixpath.join(os.path.realpath(root), run) + "/" for root in (store, staging))
    if at_rest.startswith(staged) or staged.startswith(at_rest):
        raise OptionsError(
            f"store {shown(store)} and staging {shown(staging)} put run {run!r} into the same directory, where the"
            f" copy in the store would overwrite what the nodes still work on. Give two separate directories.",
            option="staging",
        )


def check_template(template: str) -> str:
    """`template` with only known placeholders in it; one without any must be a root by itself (see check_root)."""
    if not isinstance(template, str):
        raise OptionsError(f"staging is {shown(template)}; give an absolute path or a template.", option="staging")
    rest = _PLACEHOLDER.sub("", template)
    if rest == template and "{" not in rest and "}" not in rest:
        return check_root("staging", template)
    for inner in _PLACEHOLDER.findall(template):
        kind, colon, name = inner.partition(":")
        known = (kind in ("label", "env") and name) or (kind in ("hostname", "node_ip") and not colon)
        if not known:
            close = difflib.get_close_matches(kind, ["label", "env", "hostname", "node_ip"], n=1)
            hint = f" Did you mean {close[0]}?" if close and close[0] != kind else ""
            raise OptionsError(
                f"staging is {shown(template)}: unknown placeholder {{{inner}}}.{hint}"
                f" Known: {', '.join(PLACEHOLDERS)}.",
                option="staging",
            )
    if "{" in rest or "}" in rest:
        raise OptionsError(
            f"staging is {shown(template)}: a brace without its partner. Placeholders: {', '.join(PLACEHOLDERS)}.",
            option="staging",
        )
    if not template.startswith(("/", "{label:", "{env:", "file:///")):
        raise OptionsError(
            f"staging is {shown(template)}, which is relative: it must start with / or with a placeholder whose value"
            f" is an absolute path ({{label:NAME}} or {{env:NAME}}).",
            option="staging",
        )
    return template


def has_placeholders(template: str) -> bool:
    """Whether the staging root differs from node to node and must be resolved on each."""
    return _PLACEHOLDER.search(template) is not None


def resolve_staging(
    template: str, *, labels: Mapping[str, str], env: Mapping[str, str], hostname: str, node_ip: str
) -> str:
    """The staging root of one node: `template` with that node's labels, environment and names filled in.

    Raises OptionsError for an unknown placeholder, a label the node lacks (lists those it has), an unset or empty
    environment variable, or a result that may not be a root (see check_root).
    """
    check_template(template)

    def fill(match: re.Match[str]) -> str:
        kind, _, name = match.group(1).partition(":")
        if kind == "hostname":
            return hostname
        if kind == "node_ip":
            return node_ip
        if kind == "env":
            value = env.get(name, "")
            remedy = f"Set {name} on that node, or in the runtime_env of the job"
        else:
            value = labels.get(name, "")
            known = ", ".join(sorted(labels)) or "none at all"
            remedy = f"It has these labels: {known}. Start it with `ray start --labels {name}=...`"
        if not value:
            what = "environment variable" if kind == "env" else "label"
            raise OptionsError(
                f"staging is {shown(template)}, but node {hostname} ({node_ip}) has no {what} {name!r}. {remedy},"
                f" or give staging as a plain path.",
                option="staging",
                node=hostname,
            )
        return value

    return check_root("staging", _PLACEHOLDER.sub(fill, template))


def plain_path(option: str, value: str) -> str:
    """The path that `value` (a path, perhaps relative, or a file:// URL) names. Raises OptionsError otherwise."""
    if not isinstance(value, str) or not value:
        raise OptionsError(f"{option} is {shown(value)}; give an absolute path.", option=option)
    if "\0" in value or "\n" in value:
        raise OptionsError(f"{option} is {shown(value)}: a path holds no NUL and no line break.", option=option)
    scheme = _SCHEME.match(value)
    if scheme is None:
        if value.lower().startswith("file:"):
            raise OptionsError(f"{option} is {shown(value)}; write file:///path, or the plain path.", option=option)
        return value
    if scheme.group().lower() != "file://":
        raise OptionsError(
            f"{option} is {shown(value)}: this version stores on file systems (a local path, NFS or another mount),"
            f" not on {scheme.group()} URLs. Give an absolute path that every node can reach.",
            option=option,
        )
    parts = urlsplit(value)
    if parts.netloc not in ("", "localhost"):
        raise OptionsError(
            f"{option} is {shown(value)}: a file:// URL names no host. Mount the directory on every node, then give"
            f" its path (file:///path has three slashes).",
            option=option,
        )
    if parts.query or parts.fragment:
        raise OptionsError(f"{option} is {shown(value)}: a file:// URL has no ? or # part.", option=option)
    return unquote(parts.path) or "/"


def _refuse_ray(option: str, value: str, path: str, session_dir: str) -> None:
    forbidden = {posixpath.normpath(session_dir), os.path.realpath(session_dir)}
    for candidate in (path, os.path.realpath(path)):
        inside = any(candidate == root or candidate.startswith(root.rstrip("/") + "/") for root in forbidden)
        if inside or _RAY_SESSION.search(candidate):
            raise OptionsError(
                f"{option} is {shown(value)}, inside Ray's session directory: Ray makes that anew for every session"
                f" and node, and checkpoints in it are lost with it. Give a directory that outlives the cluster.",
                option=option,
            )
