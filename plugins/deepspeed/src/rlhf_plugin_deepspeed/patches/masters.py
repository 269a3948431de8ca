"""Stages 1 and 2 without a second copy of the weights."""

from typing import Any

from torch import distributed

from rlhf_plugin_deepspeed.patches.install import check_target, replace


def update_weights_themselves(optimizer: Any) -> None:
    """Let the optimizer of stages 1 and 2 update the weights themselves. DeepSpeed gives it a copy
    of this rank's, which only masters in a higher precision need."""
    name = check_target("no-master-copy", optimizer, "single_partition_of_fp32_groups")
    masters = getattr(optimizer, name)
    for index, parts in enumerate(optimizer.parallel_partitioned_bit16_groups):
        rank = distributed.get_rank(group=optimizer.real_dp_process_group[index])
        assert masters[index].dtype == parts[rank].dtype
        masters[index].data = parts[rank].data
    # Made anew, for it holds views of the copy.
    optimizer._link_all_hp_params()
    without_padding = optimizer._get_groups_without_padding
    # torch saves a view with all of the tensor behind it.
    replace(
        "no-master-copy",
        optimizer,
        _get_groups_without_padding=lambda groups_with_padding: [
            item.clone() for item in without_padding(groups_with_padding)
        ],
    )
