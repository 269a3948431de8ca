"""KTO with its reference in the step and on disk: the same curve on the same pairs."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_devkit import Ranks, column, ranks_fixture, tiny, without_timings

two = ranks_fixture(2)
EPOCH = 3
"""Steps of 8 of the 22 rows."""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    # Where little is pushed down the divergence is above zero.
    more = ["--kto.undesirable_weight", "0.1", "--train.steps", "6"]
    return [*tiny.short_run(tmp_path, "unpaired"), *more]


def plain(folder: Path, words: list[str], *more: str) -> list[dict[str, Any]]:
    """A run in plain torch on this rank."""
    arguments = [*words, "--output", str(folder), *more]
    return tiny.run("kto", arguments, str(folder.parent / "cache"), True)


def test_a_cached_reference_has_the_curve_of_an_engine_while_the_pairs_are_the_same(
    words: list[str], tmp_path: Path
) -> None:
    engine = plain(tmp_path / "engine", words, "--kto.reference", "engine")
    cache = plain(tmp_path / "cached", words, "--kto.reference", "cache")
    for name in ("loss", "kl", "rewards/chosen", "grad_norm"):
        found, expected = column(cache, name), column(engine, name)
        assert found[:EPOCH] == pytest.approx(expected[:EPOCH], rel=1e-4, abs=1e-5), name
    kl, other = column(cache, "kl"), column(engine, "kl")
    assert min(kl[1:]) > 0
    assert kl[EPOCH:] != pytest.approx(other[EPOCH:], rel=1e-2), "an engine has new pairs"


def test_a_second_run_finds_the_logprobs_and_has_the_same_curve_to_the_last_bit(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = plain(tmp_path / "first", words)
    assert "58 examples computed in" in reference(capsys)
    second = plain(tmp_path / "second", words, "--data.workers", "1")
    assert "every row is trained on" in (line := reference(capsys))
    assert "; found in" in line
    assert without_timings(second) == without_timings(first)
    plain(tmp_path / "other", words, "--train.seed", "1", "--train.stop_at", "1")
    assert "29 examples computed in" in reference(capsys)


def reference(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("reference "))
    return line


def test_a_resumed_run_has_the_same_pairs(words: list[str], tmp_path: Path) -> None:
    straight = plain(tmp_path / "straight", words)
    plain(tmp_path / "halves", words, "--train.stop_at", str(EPOCH + 1))
    halves = plain(tmp_path / "halves", words, "--resume")
    for name in ("loss", "kl", "grad_norm"):
        assert column(halves, name) == column(straight, name)
    assert without_timings(halves[-1:]) == without_timings(straight[-1:])


@pytest.mark.parametrize("more", [(), ("--lora.rank", "4", "--kto.reference", "cache")])
def test_two_ranks_at_stage_3_have_the_curve_of_one(
    more: Any, words: list[str], tmp_path: Path, two: Ranks
) -> None:
    one = plain(tmp_path / "one", words, *more)
    arguments = [*words, *more, "--deepspeed.stage", "3", "--output", str(tmp_path / "two")]
    cache = str(tmp_path / "cache of two")
    metrics = two.run(tiny.run, "kto", arguments, cache)[0]
    for name in ("loss", "kl", "grad_norm"):
        assert column(metrics, name) == pytest.approx(column(one, name), rel=1e-4, abs=1e-5)
    assert metrics[-1] == pytest.approx(one[-1], rel=1e-4, abs=1e-4)
