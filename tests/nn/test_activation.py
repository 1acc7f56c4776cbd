from __future__ import annotations

from typing import get_args

import pytest
import torch

from tessera.nn.forms.plain import activation_function
from tessera.nn.spec import Activation
from tests.nn import peers


@pytest.mark.parametrize("name", get_args(Activation))
def test_activations_are_those_of_transformers(name: str) -> None:
    x = torch.linspace(-6, 6, 1001)
    torch.testing.assert_close(activation_function(name)(x), peers.ACT2FN[name](x), rtol=1e-5, atol=1e-6)
