"""Files of robots.txt that are made to be costly."""

from __future__ import annotations

import pytest

from connectors.website.robots import MAX_COPIES, MAX_RULES, parsed_robots


def names(count: int) -> str:
    return "".join(f"User-Agent: bot{number}\n" for number in range(count))


def rules(count: int) -> str:
    return "".join(f"Disallow: /{number}\n" for number in range(count))


@pytest.mark.parametrize(
    "text",
    [
        names(1) + rules(MAX_RULES + 1),
        names(1_000) + rules(MAX_COPIES // 1_000 + 1),
        "".join(f"user agent bot{number}\nsitemap: /s\n" for number in range(1_000)) + rules(1_000),
        "".join(f"useragent: bot{number}\ncrawl-delay\n" for number in range(1_000)) + rules(1_000),
        names(1_000) + "disallow /x\n" * 1_000,
        names(400) + "Disallow:\nUserx:\n" + rules(2_500),
        "".join(f"User-Agent: b*ot{number}\n" for number in range(150)) + rules(1_000),
    ],
)
def test_rules_that_are_copied_for_very_many_names_are_refused(text: str) -> None:
    """15,000 rules for 15,000 names are 280 kB, and took gigabytes and minutes in the process of all connectors."""
    assert parsed_robots(text.encode()) is None


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"User-agent: bot{n}\nCrawl-delay: 9\n" for n in range(2_000)) + "User-agent: *\nDisallow: /private\n",
        "User-agent: *\nDisallow: /private\n" + "".join(f"Sitemap: /{n}.xml\n" for n in range(MAX_RULES + 1)),
    ],
)
def test_what_copies_no_rule_is_not_counted(text: str) -> None:
    robots = parsed_robots(text.encode())
    assert robots is not None
    assert not robots.can_fetch("https://docs.example.com/private", "penstock")


def test_a_long_file_of_ordinary_groups_is_read() -> None:
    text = "# comment\n" * MAX_RULES + "".join(f"User-agent: bot{n}\nDisallow: /{n}\n\n" for n in range(9_000))
    robots = parsed_robots(text.encode())
    assert robots is not None
    assert not robots.can_fetch("https://docs.example.com/8999", "bot8999")
    assert robots.can_fetch("https://docs.example.com/8999", "other")
