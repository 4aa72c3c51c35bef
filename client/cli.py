"""The command line. It reads arguments, asks one function and hands the answer to an Output; nothing else.

Exit codes: 0 done; 1 it failed, or there is nothing there; 2 the command line or an option is wrong, and for `verify`
something is wrong with a checkpoint. What a command needs is imported when it runs: `--help` needs no torch and no Ray.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..storage.errors import LastgoodError, NotACheckpointError, UsageError
from .demo import DEFAULT_SAVE_FREQ, DEFAULT_STEPS, run_demo
from .output import Output, make_output

app = typer.Typer(
    name="lastgood",
    help="Keeps the last good checkpoint of a distributed RL training run on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on one line (keys: docs/cli.md).")]
PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="Directory or file:// URL of a run (<store>/<run>), of one of its steps, or of one attempt.",
    ),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run that lives on the cluster.")]
AddressOption = Annotated[str, typer.Option("--address", help="Address of the Ray cluster.")]


class Wait(str, enum.Enum):
    """What `save` waits for."""

    COMMITTED = "committed"
    DURABLE = "durable"


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = DEFAULT_STEPS,
    save_freq: Annotated[int, typer.Option(min=1, help="Steps between saves.")] = DEFAULT_SAVE_FREQ,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Leave the checkpoints there.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Trains a small model twice, once with crashes, and compares the two runs bit for bit."""
    with _telling(as_json) as output:
        code = run_demo(steps=steps, save_freq=save_freq, keep=keep, json_output=as_json, console=output.console)
        raise typer.Exit(code)


@app.command()
def latest(place: PlaceArgument, as_json: JsonOption = False) -> None:
    """Shows the newest committed checkpoint. Exit code 1 if there is none. Needs no Ray."""
    with _telling(as_json) as output:
        from . import at_rest

        newest = at_rest.latest(place)
        output.passed_over(newest.passed_over)
        output.latest(newest.checkpoint)


@app.command()
def checkpoints(place: PlaceArgument, as_json: JsonOption = False) -> None:
    """Lists the committed checkpoints, newest first, and what was rejected. Needs no Ray."""
    with _telling(as_json) as output:
        from . import at_rest

        listing = at_rest.listing(place)
        output.checkpoints(listing.found, listing.rejected)


@app.command()
def verify(
    place: PlaceArgument,
    attempt: Annotated[str | None, typer.Option(metavar="ID", help="Only this attempt.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Reads and hashes every shard again. Exit code 2 if a byte or a file is wrong. Needs no Ray."""
    with _telling(as_json) as output:
        from . import at_rest

        results, rejected = at_rest.verify(place, attempt)
        output.verified(results, rejected)
        if any(one.wrong for one in rejected) or not all(one.ok for one in results):
            raise typer.Exit(2)


@app.command()
def show(
    place: PlaceArgument,
    attempt: Annotated[str | None, typer.Option(metavar="ID", help="This attempt; else the newest there.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what a checkpoint consists of. Needs no Ray."""
    with _telling(as_json) as output:
        from . import at_rest

        shown, passed_over = at_rest.show(place, attempt)
        output.passed_over(passed_over)
        output.shown(shown)


@app.command()
def save(
    run: RunArgument,
    tag: Annotated[str | None, typer.Option(help="A name for the checkpoint.")] = None,
    deadline: Annotated[
        float | None, typer.Option(metavar="S", min=0.001, help="Seconds until it must be committed.")
    ] = None,
    from_memory: Annotated[
        bool, typer.Option("--from-memory", help="The newest snapshot in memory, whatever the run does now.")
    ] = False,
    wait: Annotated[Wait, typer.Option(help="What to wait for.")] = Wait.COMMITTED,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0.001, help="Seconds to wait for that; 900 if not given.")
    ] = None,
    reason: Annotated[
        str, typer.Option(help="A sentence that the checkpoint keeps.")
    ] = "asked for on the command line",
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Saves a live run now. Exit code 1 if it fails, or has not come to what was waited for in time."""
    with _telling(as_json) as output:
        from .attach import connect

        run_ = connect(run, address=address)
        handle = run_.save(tag, deadline_s=deadline, reason=reason, from_memory=from_memory)
        # A save that fails is a SaveFailedError, one that is late a DeadlineError: both end in exit code 1.
        outcome = handle.wait(wait.value, **({} if timeout is None else {"timeout_s": timeout}))
        output.saved(outcome.state.value, outcome.step, outcome.attempt)


@app.command()
def status(run: RunArgument, address: AddressOption = "auto", as_json: JsonOption = False) -> None:
    """Shows what a live run's coordinator knows."""
    with _telling(as_json) as output:
        from .attach import connect

        output.status(run, connect(run, address=address).status())


@app.command()
def story(
    run: RunArgument,
    step: Annotated[int, typer.Argument(min=0, metavar="STEP", help="Step that was saved, or was to be.")],
    address: AddressOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Tells everything about the saves of one step of a live run. Exit code 1 if there were none."""
    with _telling(as_json) as output:
        from .attach import connect

        told = connect(run, address=address).story(step)
        output.told(run, step, told)
        if not told:
            raise typer.Exit(1)


@app.command()
def watch(run: RunArgument, address: AddressOption = "auto", as_json: JsonOption = False) -> None:
    """Tells each new checkpoint of a live run when it is committed and when it is durable, until the run ends."""
    with _telling(as_json) as output:
        from .attach import connect

        for checkpoint in connect(run, address=address).watch():
            output.saved(checkpoint.state.value, checkpoint.step, checkpoint.attempt)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"lastgood {installed('lastgood')}")
        raise typer.Exit


def main() -> None:
    """The console script `lastgood`."""
    app()


@contextmanager
def _telling(as_json: bool) -> Iterator[Output]:
    """The output of one command; an error of lastgood becomes one message and an exit code, without a traceback."""
    output = make_output(as_json)
    try:
        yield output
    except BrokenPipeError:
        raise  # the reader of a pipe has left; typer ends quietly
    except NotACheckpointError as error:
        output.failed(error)  # nothing there is an answer, not a wrong command line
        raise typer.Exit(1) from None
    except UsageError as error:
        output.failed(error)
        raise typer.Exit(2) from None
    except (LastgoodError, OSError) as error:
        output.failed(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


if __name__ == "__main__":
    main()
