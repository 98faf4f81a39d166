"""The two protocols hold in every order of events, and each fix is needed: without it the explorer finds the defect."""

from __future__ import annotations

from tests.simulation.connector_model import ConnectorModel
from tests.simulation.explore import Explorer
from tests.simulation.keywords_model import KeywordsModel


def test_in_every_order_of_events_the_keyword_index_converges_to_the_ledger() -> None:
    for model in (KeywordsModel(), KeywordsModel(accepts=3, kills=0, timeouts=0)):
        explored = Explorer(model).run()
        assert explored.violation is None, str(explored)
        assert explored.states > 20_000  # a model that hardly moves proves nothing


def test_without_recorded_bulks_a_dead_workers_late_bulk_restores_a_deleted_document() -> None:
    explored = Explorer(KeywordsModel(records_bulks=False)).run()
    assert explored.violation is not None
    assert explored.path[-2:] == (
        "Elasticsearch forgets the tombstone",
        "a bulk of nobody lands: content 1 at version 1",
    )


def test_without_keeping_old_bulk_records_two_stalled_workers_leave_an_old_text() -> None:
    """The answer to a bulk whose claim is older than deletes are remembered says nothing for certain."""
    explored = Explorer(KeywordsModel(keeps_old_records=False)).run()
    assert explored.violation is not None
    assert "Elasticsearch forgets the tombstone" in explored.path
    assert explored.path[-3:] == (
        "the bulk of worker 0 lands: content 1 at version 1",
        "worker 0 confirms",
        "worker 1 confirms",
    )


def test_without_reopening_entries_a_late_bulk_check_deletes_a_recreated_text_is_lost() -> None:
    explored = Explorer(KeywordsModel(doubts_deletes=False, accepts=3, timeouts=0)).run()
    assert explored.violation is not None
    assert not any("tombstone" in step for step in explored.path)


def test_without_a_claim_a_dead_workers_entry_stays_in_the_index() -> None:
    explored = Explorer(KeywordsModel(claims=False)).run()
    assert explored.violation is not None
    assert not any("tombstone" in step for step in explored.path)


def test_confirming_without_checking_want_seq_settles_an_outdated_state() -> None:
    assert Explorer(KeywordsModel(checks_want=False, accepts=3, timeouts=0)).run().violation is not None


def test_in_every_order_of_events_the_ledger_converges_to_the_source() -> None:
    explored = Explorer(ConnectorModel()).run()
    assert explored.violation is None, str(explored)
    assert explored.states > 20_000


def test_without_a_recorded_intent_a_change_reverted_after_a_crash_is_never_noticed() -> None:
    explored = Explorer(ConnectorModel(intends=False)).run()
    assert explored.violation is not None
    assert explored.path[-1].endswith("finds nothing changed")


def test_without_stamping_before_reading_a_replaced_runner_publishes_a_stale_text() -> None:
    assert Explorer(ConnectorModel(stamps_before_reading=False)).run().violation is not None


def test_without_fencing_a_replaced_runner_records_a_stale_row() -> None:
    assert Explorer(ConnectorModel(fences=False)).run().violation is not None
