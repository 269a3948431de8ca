"""Any JSON value at any place of a row makes rows or one line that says what is wrong with it."""

from typing import Any

import pytest
from damaged_rows import BASES, READERS, check, damaged_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from read_rows import FORMATS, read_rows

from rlhf_rows import Reader


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(damaged_rows(), st.sampled_from(READERS))
def test_any_value_at_any_place_is_read_or_refused(
    damaged: tuple[str, dict[str, Any]], reader: Reader
) -> None:
    check(*damaged, reader)


@pytest.mark.matrix
@settings(max_examples=10_000, deadline=None, database=None, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
@given(damaged_rows(), st.sampled_from(READERS))
def test_any_value_at_any_place_of_ten_thousand_rows(
    damaged: tuple[str, dict[str, Any]], reader: Reader
) -> None:
    check(*damaged, reader)


def test_the_rows_before_damage_are_read_and_cover_all_formats() -> None:
    assert {format for format, _ in BASES} == {*FORMATS}
    for format, row in BASES:
        reader = READERS[2] if "tools" in row or "functions" in row else READERS[0]
        assert read_rows(format, [("rows.jsonl line 1", row)], reader)[0]
