"""The page of cases names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_of_cases_names_exists() -> None:
    page = (ROOT / "docs" / "cases.md").read_text()
    named = re.findall(r"`([a-z]+/test_\w+\.py)(?:::(\w+))?`", page)
    assert len(named) > 25
    missing = []
    for file, test in named:
        path = ROOT / "tests" / file
        if not path.exists() or (test and not re.search(rf"def {test}\(", path.read_text())):
            missing.append(f"{file}::{test}")
    assert not missing
