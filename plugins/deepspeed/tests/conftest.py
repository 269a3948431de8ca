"""Two ranks, one and three, shared by all tests of the session."""

from rlhf.testing.ranks import ranks_fixture

pair = ranks_fixture(2)
single = ranks_fixture(1)
three = ranks_fixture(3)
