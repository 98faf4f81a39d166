"""A library counts as installed when it can be imported."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from pipeline.installed import is_installed


def test_a_library_that_can_be_imported_is_installed_and_is_not_imported() -> None:
    sys.modules.pop("this", None)  # Python's own, which prints when it is imported
    assert is_installed("this", "json")
    assert "this" not in sys.modules


@pytest.mark.parametrize("missing", ["no_such_library", "no_such_library.inner", "json.no_such_module"])
def test_one_missing_module_is_enough(missing: str) -> None:
    assert not is_installed("json", missing)


def test_a_module_that_another_one_put_in_its_place_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = ModuleType("replaced")  # without __spec__, as faust leaves its own
    monkeypatch.setitem(sys.modules, "replaced", replaced)
    assert replaced.__spec__ is None
    assert is_installed("replaced")
