"""The pools of ranks, shared with all other tests of the session."""

from rlhf_devkit import ranks_fixture

one = ranks_fixture(1)
two = ranks_fixture(2)
