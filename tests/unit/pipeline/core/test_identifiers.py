"""Identifiers, which must be found exactly, in questions and in texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.identifiers import LONGEST, MOST_TERMS, exact_names, identifiers, terms, words_of_names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("what became of PROJ-4821?", ["proj-4821"]),
        ("(PROJ-4821's) and PROJ-4821.", ["proj-4821"]),
        ("proj-4821", ["proj-4821"]),
        ("net::ERR_CONN_RESET", ["net::err_conn_reset"]),
        ("it says ERR_CONN_RESET, twice", ["err_conn_reset"]),
        ("error 0x80070057 again", ["0x80070057"]),
        ("open `config.yaml`.", ["config.yaml"]),
        ("in src/app/main.py:42", ["src/app/main.py"]),
        ("C:\\Windows\\System32", ["windows/system32"]),
        ("/etc/hosts and ./run.sh", ["etc/hosts", "run.sh"]),
        ("v2.3.1 after 2.3.0-rc1", ["v2.3.1", "2.3.0-rc1"]),
        ("CVE-2024-3094, ORA-00942, KB5034441, #1234", ["cve-2024-3094", "ora-00942", "kb5034441", "#1234"]),
        ("git push --force-with-lease", ["--force-with-lease"]),
        ("std::vector or os.path.join()", ["std::vector", "os.path.join"]),
        ("a9f3c21 and 10.0.0.1:8080", ["a9f3c21", "10.0.0.1"]),
        ("https://git.example/browse/PROJ-7?at=1", ["git.example/browse/proj-7"]),
    ],
)
def test_identifiers_are_recognised_within_any_sentence(text: str, expected: list[str]) -> None:
    assert list(identifiers(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "and/or, TCP/IP, e.g. this, i.e. that, U.S. law",
        "a well-known high-speed boundary-layer",
        "in 1957 at m=2.5, 3.5 mm, 1990s, fig. 3",
        "What is the meaning of life?",
        "1/2/3 and 01/02/2024",
        "F-104 at mach-2",
        "",
    ],
)
def test_ordinary_words_and_numbers_are_not_identifiers(text: str) -> None:
    assert identifiers(text) == ()


def test_identifier_terms_include_the_whole_the_path_suffixes_and_the_parts() -> None:
    assert {"src/app/main.py", "app/main.py", "main.py", "src", "app", "main"} <= set(terms("see src/app/main.py"))
    assert {"err_conn_reset", "err", "conn", "reset"} <= set(terms("ERR_CONN_RESET"))
    assert "2.3.1" in terms("v2.3.1")


def test_exact_names_do_not_match_longer_or_partial_identifiers() -> None:
    for other in ("PROJ-48210", "PROJ-4821-B", "XPROJ-4821", "PROJ 4821", "4821 PROJ"):
        assert "proj-4821" not in exact_names(other)
    assert "main.py" in exact_names("src/app/main.py")
    assert "main.py" not in exact_names("src/app/domain.py src/app/main.pyc")
    assert "v2.3.1" not in exact_names("v2.3.10 v2.3")


@pytest.mark.heavy
@given(st.text())
def test_identifiers_of_any_text_are_extracted_without_failure_or_duplicates(text: str) -> None:
    whole = identifiers(text)
    assert len(whole) == len(set(whole))
    assert set(whole) <= set(terms(text)) or len(terms(text)) == MOST_TERMS
    assert set(whole) <= exact_names(text)


NAMES = ("PROJ-4821", "ERR_CONN_RESET", "0x80070057", "config.yaml", "src/app/main.py", "v2.3.1")
AROUND = ("{}", "({})", "{}.", "“{}”", "see {}, please", "`{}`", "[{}](x)", "{}\n", "{}?", "*{}*", "{}:")


@given(st.sampled_from(NAMES), st.sampled_from(AROUND))
def test_an_identifier_is_recognised_whatever_surrounds_it(one: str, around: str) -> None:
    assert one.lower() in identifiers(around.format(one))


def test_overlong_identifiers_are_ignored_and_terms_are_limited() -> None:
    assert identifiers("A_1" * LONGEST) == ()
    assert len(terms(" ".join(f"X_{n}/y{n}.txt" for n in range(MOST_TERMS)))) == MOST_TERMS
    assert identifiers("_" * 199 + " " + "a_" * 99 + "!" + " " + "-a." * 66) is not None


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("asyncio.Task.print_stack", "asyncio task print stack"),
        ("Budget_2026-Q3_final.xlsx", "budget 2026 q3 final xlsx"),
        ("src/app/AccessDeniedHandler.java", "access denied handler java"),
        ("XMLParser of PostgreSQL", "xml parser postgre sql"),
        ("__init__.py", "init py"),
        ("ÄnderungsAntrag.pdf", "änderungs antrag pdf"),
        ("A plain, well-known title (it's 3.11, 10.0.0.1 or U.S. law)", ""),
        ("GET", ""),
        ("", ""),
    ],
)
def test_the_words_of_names_are_searchable(title: str, words: str) -> None:
    """Analyzers take `print_stack` and `Budget_2026.xlsx` for one word each."""
    assert words_of_names(title) == words


@given(st.text())
def test_words_of_names_are_few_and_in_lower_case(text: str) -> None:
    words = words_of_names(text)
    assert words == words.lower()
    assert len(words.split()) <= MOST_TERMS
