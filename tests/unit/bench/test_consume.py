"""The comparison of faust with aiokafka alone: its arithmetic."""

from __future__ import annotations

from bench.consume import Meter, ratios


def test_ratios_are_of_medians() -> None:
    runs = [("faust", {"read_s": s}) for s in (2.0, 9.0, 3.0)] + [("aiokafka", {"read_s": s}) for s in (1.0, 1.5, 80.0)]
    assert ratios(runs) == {"read_s": {"faust": 3.0, "aiokafka": 1.5, "ratio": 2.0}}


def test_a_meter_ends_with_the_last_expected_record() -> None:
    meter = Meter(expected=3)
    assert [meter.read() for _ in range(3)] == [False, False, True]
    assert meter.result is not None
    assert meter.result["read_s"] >= 0
