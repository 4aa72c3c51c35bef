"""Many trials on one field, each written down; a failed one keeps its directories and logs."""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.chaos.breaker import TITLES, lives
from tests.chaos.field import Field
from tests.chaos.plan import Plan, draw
from tests.chaos.trial import Conduct

QUIET_S = 15.0
Say = Callable[[str], None]


class Campaign:
    """Runs trials one after the other; the field is built anew only when a trial needs or has spoilt it."""

    def __init__(self, *, slots: int, kept: Path, say: Say = lambda text: None) -> None:
        """`kept`: where failed trials leave their directories."""
        self.field = Field(slots)
        self._kept = kept
        self._say = say
        self._witness: int | None = None

    def __enter__(self) -> Campaign:
        self.field.build()
        return self

    def __exit__(self, *_: object) -> None:
        self.field.close()

    def plan(self, seed: int, trial: int) -> Plan:
        return draw(seed, trial, slots=self.field.slots, cuttable=self.field.cuttable)

    def run(self, plan: Plan) -> dict[str, Any]:
        """Runs one trial; answers its record, `ok` or with `why` it failed."""
        began = time.monotonic()
        self._say(f"{plan}")
        if self.field.down() or not self._quiet():
            self._renew()
        trial = Conduct(plan, self.field, self.field.root / f"trial-{plan.seed}-{plan.trial}")
        why = None
        try:
            if plan.witnessed:
                self._show(trial)
            trial()
        except Exception as error:  # noqa: BLE001 - whatever it is, this trial failed, and the next one is run
            why = str(error) if type(error).__name__ == "TrialError" else traceback.format_exc()
        record = trial.record(time.monotonic() - began, why)
        if why is not None:
            record["kept"] = str(self._keep(trial))
            self._say(f"  FAILED after {record['took_s']} s: {why}\n  kept: {record['kept']}")
            self._renew()
            for image in trial.images():
                shutil.rmtree(image, ignore_errors=True)
        else:
            shutil.rmtree(trial.folder, ignore_errors=True)
            fired = [f"{f['kind']} {f['victim']} in {f['phase']}" for f in record["faults"] if f["fired"]]
            self._say(
                f"  ok in {record['took_s']} s: {', '.join(fired) or 'nothing fired'}; {record['commits']} commits"
            )
        return record

    def _show(self, trial: Conduct) -> None:
        """Tells the witness where to look; starts it if it does not live."""
        path = self.field.root / "witness.json"
        new = path.with_suffix(".new")
        facts = {"address": self.field.address, "run": trial.run, "folder": str(trial.folder)}
        new.write_text(json.dumps(facts))
        new.rename(path)
        if self._witness is None or not lives(self._witness):
            self._witness = self.field.start("tests.chaos.witness", str(path), self.field.root / "witness.log")

    def _quiet(self) -> bool:
        """Waits until the last trial's ranks have ended with their driver."""
        until = time.monotonic() + QUIET_S
        while any(self.field.named(title) for title in TITLES.values()):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def _keep(self, trial: Conduct) -> Path:
        place = self._kept / trial.folder.name
        shutil.rmtree(place, ignore_errors=True)
        self._kept.mkdir(parents=True, exist_ok=True)
        with suppress(OSError, shutil.Error):
            shutil.copytree(trial.folder, place, symlinks=True)
            shutil.copytree(self.field.logs, place / "ray", symlinks=True, ignore_dangling_symlinks=True)
        (place / "why.txt").write_text(f"{trial.plan}\n{trial.plan!r}\n\n{trial.record(0, None)}\n")
        return place

    def _renew(self) -> None:
        self.field.raze()
        self._witness = None
        self.field.build()


def run_trials(
    plans: Iterable[tuple[int, int]], *, slots: int, minutes: float | None, records: Path, kept: Path
) -> list[dict[str, Any]]:
    """Runs trials by (seed, number) until `minutes` are over; appends a JSON line for each to `records`."""
    until = time.monotonic() + (minutes * 60 if minutes is not None else float("inf"))
    done = []
    records.parent.mkdir(parents=True, exist_ok=True)
    with Campaign(slots=slots, kept=kept, say=_print) as campaign, records.open("a") as file:
        if not campaign.field.cuttable:
            _print("no network namespaces here (root and iproute2 are needed): nothing is cut off")
        for seed, trial in plans:
            if time.monotonic() > until:
                break
            record = campaign.run(campaign.plan(seed, trial))
            done.append(record)
            file.write(f"{json.dumps(record)}\n")
            file.flush()
    return done


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
