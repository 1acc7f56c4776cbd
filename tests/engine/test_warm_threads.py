"""A warm-up on the CPU keeps to one thread, and leaves torch's as they were."""

from __future__ import annotations

import pytest
import torch

from tessera.engine.process import one_thread
from tests.torch_threads import torch_threads


def test_one_thread_inside_and_all_again_after_an_error() -> None:
    with torch_threads(3):
        with pytest.raises(ValueError, match="inside"), one_thread():
            assert torch.get_num_threads() == 1
            raise ValueError("inside")
        assert torch.get_num_threads() == 3
