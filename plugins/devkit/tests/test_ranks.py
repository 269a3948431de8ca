"""The pool of ranks: results by rank, failures with their rank, and a pool that recovers."""

import os
import time

import pytest
from attrs import frozen
from torch import distributed, ones

from rlhf.errors import RLHFError
from rlhf_devkit import ranks
from rlhf_devkit.ranks import RankFailure, Ranks


@frozen
class Note:
    """A class of a test file, to be pickled both ways."""

    text: str


@pytest.fixture(scope="module")
def pool():
    made = Ranks(2)
    yield made
    made.close()


def total(values, note):
    tensor = ones(1) * values[distributed.get_rank()]
    distributed.all_reduce(tensor)
    return float(tensor), note, os.environ["RANK"]


def process():
    return os.getpid()


def fail_on_one():
    if distributed.get_rank() == 1:
        print("what was printed")
        raise ValueError("rank one has had enough")
    distributed.barrier()


def die_on_one():
    if distributed.get_rank() == 1:
        os._exit(7)
    distributed.barrier()


def sleep(seconds):
    time.sleep(seconds)


def refuse(note):
    raise RLHFError(f"rank {distributed.get_rank()} refuses {note.text}")


def fail_in_another_way_or_not():
    if distributed.get_rank() == 1:
        raise ValueError("rank one has had enough")


def unpicklable():
    return (number for number in range(2))


def test_every_rank_runs_the_function_and_answers_in_order(pool):
    answers = pool.run(total, [1.0, 2.0], Note("both"))
    assert answers == [(3.0, Note("both"), "0"), (3.0, Note("both"), "1")]


def test_the_processes_stay_between_runs(pool):
    first = pool.run(process)
    assert pool.run(process) == first
    assert len(set(first)) == 2


def test_a_failure_names_its_rank_and_the_pool_recovers(pool, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE", 0.5)  # Rank 0 waits for rank 1.
    with pytest.raises(RankFailure) as error:
        pool.run(fail_on_one)
    text = str(error.value)
    assert text.startswith("rank 1 of 2 in fail_on_one: Traceback")
    assert "ValueError: rank one has had enough" in text
    assert "what was printed" in text
    assert pool.run(total, [1.0, 1.0], Note(""))[0][0] == 2.0


def test_errors_for_users_are_texts_after_which_the_processes_stay(pool):
    first = pool.run(process)
    assert pool.errors(refuse, Note("both")) == ["rank 0 refuses both", "rank 1 refuses both"]
    assert pool.run(process) == first


def test_another_error_or_none_where_errors_are_expected_is_a_failure(pool):
    with pytest.raises(RankFailure) as error:
        pool.errors(fail_in_another_way_or_not)
    none, another = str(error.value).split("rank 1 of 2")
    assert none.startswith("rank 0 of 2 in fail_in_another_way_or_not: Traceback")
    assert "AssertionError: the function raised no RLHFError" in none
    assert "ValueError: rank one has had enough" in another


def test_the_error_of_a_dead_process_has_its_exit_code(pool):
    with pytest.raises(RankFailure) as error:
        pool.run(die_on_one)
    assert "rank 1 of 2 in die_on_one: the process died with exit code 7" in str(error.value)


def test_a_rank_that_hangs_ends_with_the_timeout(pool):
    with pytest.raises(RankFailure) as error:
        pool.run(sleep, 60.0, timeout=0.5)
    assert str(error.value) == "rank 0, 1 of 2 in sleep: no answer within 0.5 s"


def test_a_result_that_cannot_be_sent_is_a_failure(pool):
    with pytest.raises(RankFailure) as error:
        pool.run(unpicklable)
    assert "in unpicklable: Traceback" in str(error.value)
