"""Row formats are found by name; what is wrong with one is told in a line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.data.rows import load_format
from rlhf.errors import RLHFError

PLUGIN = """
    from rlhf.plugin import FormatPlugin

    plugin = FormatPlugin(read="their_rows:read")

    def read(row, reader):
        return []
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pairs", "format 'pairs' is not installed; available: none"),
        (
            "prefrence",
            "format 'prefrence' is not installed (did you mean 'preference'? "
            "run `pip install rlhf-rows`); available: none",
        ),
        (
            "preference",
            "format 'preference' is not installed (run `pip install rlhf-rows`); available: none",
        ),
        (
            "stepwise",
            "format 'stepwise' is not installed (run `pip install rlhf-plugin-prm`); "
            "available: none",
        ),
    ],
)
def test_a_format_that_is_not_installed_is_named(
    name: str, message: str, install: Callable[..., Path]
) -> None:
    with pytest.raises(RLHFError) as caught:
        load_format(name)
    assert str(caught.value) == message


def test_a_bare_function_is_no_format(install: Callable[..., Path]) -> None:
    install("their-rows", {"formats": {"theirs": "their_rows:plugin"}}, {"their_rows": PLUGIN})
    with pytest.raises(RLHFError) as caught:
        load_format("theirs")
    assert str(caught.value) == (
        "format 'theirs' of their-rows 1.0: their_rows:read is not a row format; decorate it with "
        "rlhf_rows.row_format"
    )


def test_a_trainer_names_its_format() -> None:
    with pytest.raises(RLHFError) as caught:
        load_format(object)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "row_format is <class 'object'>; give the name of an installed row format"
    )
