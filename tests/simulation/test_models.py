"""The two protocols hold in every order of events, and each fix is needed: without it the explorer finds the defect."""

from __future__ import annotations

from tests.simulation.connector_model import ConnectorModel
from tests.simulation.explore import Explorer
from tests.simulation.keywords_model import KeywordsModel


def test_in_every_order_of_events_the_index_comes_to_hold_what_the_ledger_wants() -> None:
    for model in (KeywordsModel(), KeywordsModel(accepts=3, kills=0, timeouts=0)):
        explored = Explorer(model).run()
        assert explored.violation is None, str(explored)
        assert explored.states > 20_000  # a model that hardly moves proves nothing


def test_a_late_bulk_of_a_dead_worker_brings_a_deleted_document_back_unless_it_is_recorded() -> None:
    explored = Explorer(KeywordsModel(records_bulks=False)).run()
    assert explored.violation is not None
    assert explored.path[-2:] == (
        "Elasticsearch forgets the tombstone",
        "a bulk of nobody lands: content 1 at version 1",
    )


def test_two_workers_that_stood_still_for_long_leave_an_old_text_unless_its_bulk_stays_recorded() -> None:
    """The answer to a bulk whose claim is older than deletes are remembered says nothing for certain."""
    explored = Explorer(KeywordsModel(keeps_old_records=False)).run()
    assert explored.violation is not None
    assert "Elasticsearch forgets the tombstone" in explored.path
    assert explored.path[-3:] == (
        "the bulk of worker 0 lands: content 1 at version 1",
        "worker 0 confirms",
        "worker 1 confirms",
    )


def test_a_text_that_is_put_back_is_lost_unless_what_the_check_of_a_late_bulk_deletes_is_doubted() -> None:
    explored = Explorer(KeywordsModel(doubts_deletes=False, accepts=3, timeouts=0)).run()
    assert explored.violation is not None
    assert not any("tombstone" in step for step in explored.path)


def test_without_a_claim_a_dead_workers_entry_stays_in_the_index() -> None:
    explored = Explorer(KeywordsModel(claims=False)).run()
    assert explored.violation is not None
    assert not any("tombstone" in step for step in explored.path)


def test_confirming_without_looking_at_want_seq_settles_what_was_overtaken() -> None:
    assert Explorer(KeywordsModel(checks_want=False, accepts=3, timeouts=0)).run().violation is not None


def test_in_every_order_of_events_the_ledger_comes_to_say_what_the_source_says() -> None:
    explored = Explorer(ConnectorModel()).run()
    assert explored.violation is None, str(explored)
    assert explored.states > 20_000


def test_a_source_that_changes_back_after_a_crash_is_never_noticed_unless_the_intent_was_recorded() -> None:
    explored = Explorer(ConnectorModel(intends=False)).run()
    assert explored.violation is not None
    assert explored.path[-1].endswith("finds nothing changed")


def test_a_runner_that_was_taken_over_publishes_a_stale_text_unless_it_is_stamped_before_reading() -> None:
    assert Explorer(ConnectorModel(stamps_before_reading=False)).run().violation is not None


def test_a_runner_that_was_taken_over_records_a_stale_row_unless_it_is_fenced() -> None:
    assert Explorer(ConnectorModel(fences=False)).run().violation is not None
