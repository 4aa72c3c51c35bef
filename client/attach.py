"""Into a run and out of nothing: attach (the driver) and connect (any other job). Nothing is touched on bad input.

Attaching makes what a run needs in the cluster: a stager on the driver's node, the coordinator. Both are found by name
when they live already; those with other options, or of another version of lastgood, are replaced unless a live driver
uses them.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, cast

import ray
import ray.exceptions

from ..coordinator.actor import create_coordinator
from ..coordinator.names import NAMESPACE, coordinator_name
from ..coordinator.options import Options
from ..coordinator.ray_names import session_dir
from ..storage.errors import DeadlineError, LastgoodError, UsageError
from ..storage.layout import check_name
from ..workers.install import agent_of
from ..workers.stager_actor import find_stagers
from . import sigterm
from .leading import changed_options, other_version
from .link import CALL_S, RETRY_S, CoordinatorLink
from .run import Run, start_stager

log = logging.getLogger("lastgood")

QUIET_S = 2.0  # how long attach says nothing
DRIVER_GONE_S = 15.0  # how long attach waits for the driver before this one to be gone


def attach(
    run: str,
    *,
    store: str | os.PathLike[str] | None = None,
    staging: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Run:
    """Attaches lastgood to the Ray cluster of this process, as the driver of `run`; starts its coordinator if needed.

    `store`: root where checkpoints are kept for good, an absolute path that is the same on every node. `staging`: root
    on each node's own fast disk, a path or a template such as "/local/{hostname}". Other options, a YAML file
    (`config`) and LASTGOOD_* variables: docs/options.md.

    Raises OptionsError for options that cannot be used, StagingError for a staging directory that cannot, StoreError
    for a store that cannot, UsageError when another live driver leads the run with other options or another version.
    """
    settings = Options.load(config, run=run, store=store, staging=staging, **options)
    connect_ray(None)
    settings.check_session(session_dir())
    link = CoordinatorLink(settings.run)
    existed = _replace_if_other(settings)
    start_stager(settings, ray.get_runtime_context().get_node_id())
    coordinator = create_coordinator(settings)
    try:
        _tell_what_it_waits_for(coordinator)
        link.call("hello", timeout_s=CALL_S)
    except LastgoodError as error:
        if not existed and not isinstance(error, DeadlineError):
            _end_all(settings.run)  # what this call has just made cannot lead; nothing is left behind
        raise
    agent_of(settings.run).join()  # as long as this process lives, the run has somebody
    run_ = Run(settings, link, leads=True)
    if settings.save_on_preemption and not sigterm.save_on_sigterm(run_.name, run_.save_before_the_end):
        log.info("attach was not called in the main thread: SIGTERM ends this process without a save")
    return run_


def connect(run: str, *, address: str | None = None) -> Run:
    """The run as any other job of the cluster sees it: save, latest, checkpoints, status.

    Raises UsageError when no coordinator of that name lives in the cluster.
    """
    check_name("run", run)
    connect_ray(address)
    link = CoordinatorLink(run)
    hello = link.call("hello", timeout_s=CALL_S)
    if found := other_version(hello):
        log.warning("this process is lastgood %s, the coordinator of %s is %s: calls may fail", found[0], run, found[1])
    return Run(Options.model_validate(hello["options"]), link, leads=False)


def connect_ray(address: str | None) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False)
    except (ConnectionError, ray.exceptions.RayError) as error:
        where = address or os.environ.get("RAY_ADDRESS") or "auto"
        raise UsageError(
            f"no Ray cluster was found at {where}: {error}. Start one, call ray.init() first, or pass its address; if "
            "it asks for a token, set RAY_AUTH_MODE=token. Without a cluster: lastgood latest <store>/<run>.",
        ) from error


def _tell_what_it_waits_for(coordinator: Any) -> None:
    """Says why a new coordinator is silent for longer than QUIET_S: it may look whether another owner lives."""
    hello = coordinator.hello.remote()
    try:
        if not ray.wait([hello], timeout=QUIET_S)[0]:
            why = ray.get(coordinator.waits_for.remote(), timeout=CALL_S)
            if why is not None:
                log.warning("%s", why)
    except ray.exceptions.RayError as error:
        log.debug("the coordinator does not tell what it waits for: %s", error)  # the next call tells what is wrong


def _replace_if_other(options: Options) -> bool:
    """Whether a coordinator lives that can be used; one with other options, or of another version, ends first, when no
    member lives.

    Raises UsageError when another live driver leads the run, or members of such a one live.
    """
    try:
        handle = ray.get_actor(coordinator_name(options.run), namespace=NAMESPACE)
    except ValueError:
        return False
    hello = _hello_without_another_driver(handle, options)
    if hello is None:
        ray.kill(handle, no_restart=True)  # it cannot even start; a new one may
        return False
    changed = changed_options(options, hello)
    said = [f"other options ({', '.join(changed)})"] if changed else []
    if found := other_version(hello):
        said.append(f"lastgood {found[1]} (this process has {found[0]})")
    if not said:
        return True
    if hello["members"] and not options.takeover:
        raise UsageError(
            f"run {options.run} is led by a live driver with {' and '.join(said)}. Nothing was touched. End that "
            "driver first, use the same, or pass takeover=True.",
            run=options.run,
            changed=sorted(changed),
        )
    log.warning("run %s had %s; coordinator and stagers start anew", options.run, " and ".join(said))
    _end_all(options.run)
    return False


def _hello_without_another_driver(handle: Any, options: Options) -> dict[str, Any] | None:
    """The coordinator's word on itself once no other driver's process lives; None when it cannot start.

    A driver that died takes a moment to be gone; DRIVER_GONE_S at most.
    """
    until = time.monotonic() + DRIVER_GONE_S
    told = False
    while True:
        try:
            hello: dict[str, Any] = cast("Any", ray.get(handle.hello.remote(), timeout=CALL_S))
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(
                f"the coordinator of run {options.run} lives and has not answered within {CALL_S:.0f} s. Nothing was "
                "touched. Is its node overloaded, or its store hanging? Attach again.",
                waited_s=CALL_S,
            ) from error
        except ray.exceptions.RayError:
            return None
        others = [process for process in hello["drivers"] if process != agent_of(options.run).process]
        led = [process for process in hello["leading_members"] if process != agent_of(options.run).process]
        if not (others or led) or options.takeover:
            return hello
        if not told:
            told = True
            log.warning(
                "run %s was led by another process; waiting up to %.0f s to see whether it lives",
                options.run,
                DRIVER_GONE_S,
            )
        if time.monotonic() > until and led:
            raise UsageError(
                f"run {options.run} is led by its members: {len(led)} live processes called lastgood.member. Nothing "
                "was touched. End them first, choose another run name, or use lastgood.connect to look or save.",
                run=options.run,
            )
        if time.monotonic() > until:
            raise UsageError(
                f"run {options.run} is led by another live driver process. Nothing was touched. End that driver first, "
                "choose another run name, use lastgood.connect to look or save, or pass takeover=True.",
                run=options.run,
            )
        time.sleep(RETRY_S)


def _end_all(run: str) -> None:
    """Ends the run's stagers, which release what they hold, and its coordinator."""
    for stager in find_stagers(run):
        try:
            ray.get(stager.close_down.remote(), timeout=CALL_S)
        except ray.exceptions.RayError as error:
            log.info("a stager was gone already: %s", error)
        ray.kill(stager, no_restart=True)
    try:
        ray.kill(ray.get_actor(coordinator_name(run), namespace=NAMESPACE), no_restart=True)
    except ValueError:
        log.debug("the coordinator was gone already")
