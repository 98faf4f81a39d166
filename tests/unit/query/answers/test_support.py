"""Sentences that the checker accepts as supported: the hand-made pairs that its thresholds were chosen on."""

from __future__ import annotations

import pytest

from query.answers.sentences import stem, terms_of
from query.answers.support import Claim, Evidence, claims_of, examine, is_no_information, is_supported

RUNBOOK = """Database failover. The primary is db-01 in Frankfurt. If it does not answer for 30 seconds, the watchdog
promotes db-02. Promotion takes about 2 minutes. During that time writes are refused with error ERR_4711, and reads go
on. Do not restart db-01 by hand: it may come back as a second primary. Page the on-call engineer of the storage
team."""
POLICY = """Travel policy. Employees book trains in second class. Flights are allowed only for journeys longer than six
hours. Hotels cost at most 140 euros a night, 180 in Zurich and London. Receipts are handed in within 30 days. Managers
approve journeys above 1,500 euros. The policy has applied since 1 March 2025."""
GIT = """Undoing a commit. `git revert` makes a new commit that undoes an earlier one; history is kept.
`git reset --hard` moves the branch back and throws local changes away: they cannot be recovered. Never reset a branch
that others have pulled."""
PASSAGES = {1: RUNBOOK, 2: POLICY, 3: GIT}

SUPPORTED = [
    ("The primary database is db-01 in Frankfurt.", 1),
    ("After 30 seconds without an answer, the watchdog promotes db-02.", 1),
    ("A promotion takes about two minutes.", 1),
    ("Writes are refused with ERR_4711 while reads go on.", 1),
    ("You should not restart db-01 by hand, because it may come back as a second primary.", 1),
    ("Page the storage team's on-call engineer.", 1),
    ("During the promotion, writes are refused, with error ERR_4711.", 1),
    ("db-01 stands in Frankfurt.", 1),
    ("Trains are booked in second class.", 2),
    ("Flights are only allowed for journeys longer than 6 hours.", 2),
    ("A hotel may cost at most 140 euros a night.", 2),
    ("In Zurich and London, hotels may cost 180 euros a night.", 2),
    ("Receipts have to be handed in within 30 days.", 2),
    ("Journeys above 1500 euros are approved by managers.", 2),
    ("The policy applies since 1 March 2025.", 2),
    ("Employees book second class on trains.", 2),
    ("`git revert` makes a new commit that undoes an earlier one.", 3),
    ("With git revert, the history is kept.", 3),
    ("git reset --hard throws local changes away, and they cannot be recovered.", 3),
    ("Never reset a branch which others have pulled.", 3),
    ("Local changes that were thrown away can't be recovered.", 3),
    ("git reset --hard moves the branch back.", 3),
]
UNSUPPORTED = [
    ("The primary database is db-03 in Frankfurt.", 1, "another name"),
    ("The primary is db-01 in Dublin.", 1, "another place"),
    ("Promotion takes about 5 minutes.", 1, "another number"),
    ("The watchdog promotes db-02 after 90 seconds.", 1, "another number"),
    ("Writes are refused with error ERR_4712.", 1, "another code"),
    ("Backups are written every night to tape.", 1, "made up"),
    ("The storage team was founded by Maria Keller.", 1, "made up"),
    ("Restarting the watchdog clears the cache of the proxy.", 1, "made up, with its words"),
    ("Restart db-01 by hand.", 1, "the negation is gone"),
    ("Employees book trains in first class.", 2, "another class"),
    ("Hotels cost at most 210 euros a night.", 2, "another number"),
    ("Hotels cost at most 180 euros a night in Madrid.", 2, "another place"),
    ("Flights are never allowed.", 2, "said too strongly"),
    ("Receipts are handed in within 60 days.", 2, "another number"),
    ("The chief executive approves all business lunches.", 2, "made up"),
    ("Managers approve journeys above 15,000 euros.", 2, "another number"),
    ("The policy has applied since 1 March 2021.", 2, "another year"),
    ("Local changes can be recovered.", 3, "the negation is gone"),
    ("git rebase rewrites the history of the remote.", 3, "made up"),
    ("Always reset a branch that others have pulled.", 3, "turned round"),
    ("git revert deletes the remote branch on GitHub.", 3, "made up"),
    ("The primary is db-01 in Frankfurt.", 2, "true, but not in what it cites"),
    ("Trains are booked in second class.", 3, "true, but not in what it cites"),
]
NOT_SEEN = frozenset(
    {
        "Employees book trains in first class.",  # one word of five
        "Restart db-01 by hand.",  # the rest of the sentence differs too much for a contradiction
        "Local changes can be recovered.",
        "Flights are never allowed.",
    }
)
"""Cases that words alone cannot decide, recorded as known limits."""


def passes(text: str, cites: int) -> bool:
    return is_supported(Claim(text, (cites,), True), {cites: Evidence(PASSAGES[cites])})


@pytest.mark.parametrize(("text", "cites"), SUPPORTED)
def test_true_claims_are_taken_as_supported(text: str, cites: int) -> None:
    assert passes(text, cites)


@pytest.mark.parametrize(("text", "cites", "why"), UNSUPPORTED)
def test_false_claims_are_taken_as_unsupported_except_the_known_misses(text: str, cites: int, why: str) -> None:
    assert passes(text, cites) == (text in NOT_SEEN), why


def test_the_labelled_claims_have_the_documented_counts() -> None:
    """22 of 22 true claims pass, 19 of 23 false ones are caught."""
    assert len(SUPPORTED) == 22
    assert len(UNSUPPORTED) - len(NOT_SEEN) == 19


def test_two_cited_passages_together_support_a_claim_neither_supports_alone() -> None:
    evidence = {1: Evidence(RUNBOOK), 2: Evidence(POLICY)}
    text = "Promotion takes about 2 minutes, and hotels cost at most 140 euros a night."
    assert is_supported(Claim(text, (1, 2), True), evidence)
    assert not is_supported(Claim(text, (1,), True), evidence)


def test_words_scattered_over_a_passage_do_not_support_a_claim() -> None:
    filler = " ".join(f"Paragraph {n} is about other things entirely." for n in range(30))
    far = f"The zeppelin was painted. {filler} The customers complained. {filler} Somebody paid in Lisbon by cheque."
    claim = Claim("The customers paid the painted zeppelin by cheque", (1,), True)
    assert not is_supported(claim, {1: Evidence(far)})


def test_claims_and_their_citations_are_extracted_from_an_answer() -> None:
    answer = """## Failover

To fail over, do this:

1. Page the storage team [1].
2. Wait for two minutes. [1][2]

Is it still down? Go on.

```sh
restart --everything
```

It is said so. Promotion takes about 2 minutes [1]."""
    claims = {claim.text: (claim.cites, claim.own) for claim in claims_of(answer)}
    assert claims == {
        "Page the storage team.": ((1,), True),
        "Wait for two minutes.": ((1, 2), True),
        "Promotion takes about 2 minutes.": ((1,), True),
    }


def test_a_sentence_without_citation_is_checked_against_the_citations_of_its_paragraph() -> None:
    answer = "The primary is db-01 in Frankfurt. Promotion takes about 2 minutes [1].\n\nReads go on in Frankfurt."
    verdict = examine(answer, PASSAGES)
    assert (verdict.claims, verdict.cited) == (3, 1)
    assert verdict.unsupported == ["Reads go on in Frankfurt."]
    assert verdict.density == pytest.approx(1 / 3)
    assert verdict.support == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("text", "says_so"),
    [
        ("I don't have information on this.", True),
        ("I don\u2019t have information on this", True),
        ("I do not have information on this. [1]", True),
        ("I don't have information on this, but db-01 is in Frankfurt.", False),
    ],
)
def test_a_statement_of_having_no_information_is_recognised(text: str, says_so: bool) -> None:
    assert is_no_information(text) == says_so


def test_claims_in_other_scripts_are_checked() -> None:
    passage = "\u4e3b\u6570\u636e\u5e93\u5728\u6cd5\u5170\u514b\u798f\u3002"
    evidence = {1: Evidence(passage)}
    assert is_supported(Claim(passage, (1,), True), evidence)
    assert not is_supported(Claim("\u5907\u4efd\u6bcf\u5929\u665a\u4e0a\u5199\u5165", (1,), True), evidence)


def test_numbers_and_word_forms_are_normalised() -> None:
    assert terms_of("1,500 euros, 3.0 and three").numbers == {"1500", "3"}
    assert stem("requests") == stem("requested") == stem("request")
    assert terms_of("don't stop").negated
