"""What DeepSpeed's hooks look up in every pass."""

import torch
from deepspeed.runtime.zero import partition_parameters
from torch import nn

from rlhf_plugin_deepspeed.patches.bookkeeping import (
    parameters_of,
    print_if_forced,
    remember_parameters,
)


def test_a_modules_parameters_are_looked_for_once():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.own = nn.Parameter(torch.zeros(1))
            self.elsewhere = []

        def ds_external_parameters(self):
            return self.elsewhere

    module = Module()
    by_search = [list(map(id, parameters_of(module, recurse))) for recurse in (False, True)]
    remember_parameters(module)
    for _ in range(2):
        found = [list(map(id, parameters_of(module, recurse))) for recurse in (False, True)]
        assert found == by_search
    module.named_parameters = None
    assert len(list(parameters_of(module, True))) == 3
    # Those that it takes from elsewhere may come later.
    other = nn.Parameter(torch.zeros(1))
    module.elsewhere = [(0, other)]
    assert list(parameters_of(module))[-1] is other


def test_the_rank_is_asked_for_only_where_something_is_said(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(partition_parameters.dist, "get_rank", lambda: asked.append(1) or 0)
    print_if_forced("nothing")
    assert not asked
    print_if_forced("something", force=True)
    assert capsys.readouterr().out == "something\n"
