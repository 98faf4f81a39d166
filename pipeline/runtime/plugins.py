"""Parts of others, which installed distributions offer through entry points (docs/plugins.md)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pipeline.core.errors import Misconfigured

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Group = Literal["penstock.sources", "penstock.rerankers", "penstock.extractors"]


@cache
def offered(group: Group) -> Mapping[str, tuple[EntryPoint, ...]]:
    """The entry points of a group by name; more than one where several distributions offer the same name. Imports none
    of them. Reads the metadata of all distributions once a process."""
    from importlib.metadata import entry_points  # here: takes 20 ms, and most processes need none

    names: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=group):
        names[point.name] = (*names.get(point.name, ()), point)
    return names


def load(group: Group, name: str) -> Any:
    """Import what a distribution offers under this name. Raises Misconfigured, with one line, where none or several do,
    or the import fails."""
    points = offered(group).get(name, ())
    if not points:
        known = ", ".join(sorted(offered(group))) or "none"
        raise Misconfigured(f"no installed distribution offers {name!r} in the group {group} (offered: {known})")
    if len({point.value for point in points}) > 1:
        owners = ", ".join(sorted({point.dist.name for point in points if point.dist is not None}))
        raise Misconfigured(f"{name!r} in the group {group} is offered by several distributions: {owners}")
    try:
        return points[0].load()
    except (ImportError, AttributeError) as error:
        raise Misconfigured(f"{name!r} in the group {group}: {points[0].value} cannot be imported ({error})") from error
