from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.dtypes import BY_SAFETENSORS, DTYPES, FLOATS, DType, bfloat16_bits, dtype_of, from_bfloat16_bits

ALL = [pytest.param(dtype, id=dtype.name) for dtype in DTYPES.values()]


@pytest.mark.parametrize("dtype", ALL)
def test_every_entry_is_of_one_size_in_torch_and_numpy(dtype: DType) -> None:
    assert dtype.torch.itemsize == dtype.itemsize
    assert dtype.numpy is None or np.dtype(dtype.numpy).itemsize == dtype.itemsize


@pytest.mark.parametrize("dtype", ALL)
def test_every_entry_is_found_by_each_of_its_names(dtype: DType) -> None:
    assert BY_SAFETENSORS[dtype.safetensors] is dtype
    assert dtype_of(dtype.torch) is dtype


def test_a_type_that_is_not_in_the_table() -> None:
    with pytest.raises(KeyError):
        dtype_of(torch.complex64)


def test_the_floats_are_the_types_that_weights_and_rows_have() -> None:
    assert list(FLOATS) == ["float32", "float16", "bfloat16"]


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    values = np.random.default_rng(0).standard_normal((64, 33)).astype(np.float32)
    values[0, :5] = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000], "<u4").view("<f4")
    expected = torch.from_numpy(values).bfloat16()
    assert (bfloat16_bits(values) == expected.view(torch.uint16).numpy()).all()
    assert (from_bfloat16_bits(bfloat16_bits(values)) == expected.float().numpy()).all()
