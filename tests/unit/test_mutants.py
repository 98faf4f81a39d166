"""Every mutant still changes something, and docs/mutants.md says what caught it."""

from __future__ import annotations

import re

from tests.simulation.mutants import MUTANTS, ROOT, TABLE, path_of


def test_every_mutants_anchor_occurs_in_its_module() -> None:
    for mutant in MUTANTS:
        source = path_of(mutant).read_text()
        assert mutant.anchor in source, f"{mutant.name}: {mutant.anchor!r} is not in {mutant.module} any more"
        assert mutant.defect != mutant.anchor
        compile(source.replace(mutant.anchor, mutant.defect, 1), mutant.module, "exec")
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_tests_named_for_each_mutant_exist() -> None:
    for file, _, name in (named.partition("::") for mutant in MUTANTS for named in mutant.tests):
        assert not name or re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), name
        assert (ROOT / file).is_file(), file


def test_every_mutant_is_in_the_documented_table_and_none_survived() -> None:
    """After a change of the mutants: ``make mutants``."""
    caught = dict(re.findall(r"^\| ([^|]+) \| `[\w.]+` \| ([\w ]+) \|", TABLE.read_text(), re.MULTILINE))
    assert set(caught) == {mutant.name for mutant in MUTANTS}
    assert not [name for name, by in caught.items() if by in ("survived", "IMPORT")]
    total = re.search(r"\*\*(\d+) deliberate defects\*\*", (ROOT / "docs" / "guarantees.md").read_text())
    assert total is not None
    assert int(total[1]) == len(MUTANTS)
