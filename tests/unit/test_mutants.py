"""Every mutant still changes something."""

from __future__ import annotations

from tests.simulation.mutants import MUTANTS, path_of


def test_every_mutants_anchor_stands_in_its_module() -> None:
    for mutant in MUTANTS:
        source = path_of(mutant).read_text()
        assert mutant.anchor in source, f"{mutant.name}: {mutant.anchor!r} is not in {mutant.module} any more"
        assert mutant.defect != mutant.anchor
        compile(source.replace(mutant.anchor, mutant.defect, 1), mutant.module, "exec")
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
