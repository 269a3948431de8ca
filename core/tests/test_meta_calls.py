"""Operators over meta tensors, each called once for all tensors of equal forms."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.memory.meta_calls import MetaCalls

aten = torch.ops.aten


class Counted:
    """An operator that counts its calls."""

    def __init__(self, operator: Any) -> None:
        self.operator, self.calls = operator, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.operator(*args, **kwargs)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def tensors(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (aten.mm.default, (meta(3, 4), meta(4, 5))),
        (aten.add.Tensor, (meta(4, 3).t(), meta(4, 3).t())),
        (aten.sum.dim_IntList, (meta(3, 4), [1])),
        (aten.native_layer_norm.default, (meta(3, 4), [4], meta(4), meta(4), 1e-5)),
    ],
)
def test_an_equal_call_has_results_of_the_same_form_and_is_not_made_again(
    operator: Any, arguments: tuple[Any, ...]
) -> None:
    call, counted = MetaCalls(), Counted(operator)
    expected = tensors(operator(*arguments))
    first, second = (tensors(call(counted, arguments, {})) for _ in range(2))
    assert counted.calls == 1
    assert [*map(form, second)] == [*map(form, first)] == [*map(form, expected)]
    storages = {tensor.untyped_storage()._cdata for tensor in (*first, *second)}
    assert len(storages) == 2 * len(expected)


@pytest.mark.parametrize(
    ("operator", "changed"),
    [
        (aten.mul.Tensor, (meta(3, 4, dtype=torch.int64), 2.0)),
        (aten.mul.Tensor, (meta(3, 4, dtype=torch.bfloat16), 2)),
        (aten.mul.Tensor, (meta(4, 3, dtype=torch.int64).t(), 2)),
        (aten.mul.Tensor, (meta(3, 5, dtype=torch.int64), 2)),
    ],
)
def test_a_call_that_differs_is_made(operator: Any, changed: tuple[Any, ...]) -> None:
    call, counted = MetaCalls(), Counted(operator)
    call(counted, (meta(3, 4, dtype=torch.int64), 2), {})
    assert form(call(counted, changed, {})) == form(operator(*changed))
    assert counted.calls == 2


@pytest.mark.parametrize(
    "operator", [aten.t.default, aten._unsafe_view.default, aten.zero_.default]
)
def test_a_result_in_memory_of_an_argument_stays_there(operator: Any) -> None:
    call, more = MetaCalls(), ([12],) if operator is aten._unsafe_view.default else ()
    for _ in range(2):
        tensor = meta(3, 4)
        result = call(operator, (tensor, *more), {})
        assert result.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_other_devices_have_their_values() -> None:
    call = MetaCalls()
    for value in (1.0, 2.0):
        assert call(aten.mul.Tensor, (torch.tensor(value), 2), {}).item() == 2 * value
        assert call(aten.full.default, ([2], value), {}).tolist() == [value, value]
