"""The one module that imports quack; loading it takes seconds, so only the functions of ``gemm`` do."""

# The library's epilogues are traced, not run: their parameters are symbols without a type.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
from quack.epilogue import gemm_epilogue
from quack.epilogue.ops import RowVecLoad
from quack.gemm_config import GemmConfig
from quack.gemm_interface import gemm_act


def _config(columns: int) -> GemmConfig:
    return GemmConfig(
        tile_m=128,
        tile_n=columns,
        pingpong=True,
        cluster_m=2,
        cluster_n=1,
        is_dynamic_persistent=False,
    )


_NARROW, _WIDE = _config(128), _config(192)


def _wherever_it_lies(function: Any) -> Any:
    """Have the library name a kernel by this function's source, as it does, in every installation.

    Of a function in a directory called site-packages it takes the module and the name alone: kernels that a
    checkout built into an engine would not be found by an installed package, and those of an older version
    would.
    """
    function.__code__ = function.__code__.replace(co_filename=f"{__name__.replace('.', '/')}.py")
    return function


@gemm_epilogue()
@_wherever_it_lies
def _plain(acc):
    return {"D": acc}


@gemm_epilogue(ops={"bias": RowVecLoad("bias")})
@_wherever_it_lies
def _biased(acc, bias):
    return {"D": acc + bias}


@gemm_epilogue()
@_wherever_it_lies
def _added(acc, c):
    return {"D": acc + c}


def activated(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor,
    *,
    wide: bool,
) -> torch.Tensor:
    """Into ``out``, half as wide as the product if the activation is a gate."""
    gemm_act(
        rows,
        weight.t(),
        bias=bias,
        activation=activation,
        store_preact=False,
        postact_out=out,
        tuned=False,
        config=_WIDE if wide else _NARROW,
        concat_layout=("B",) if activation == "swiglu" else None,
    )
    return out


def plain(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, wide: bool
) -> None:
    """``rows @ weight.T``, plus float32 ``bias`` if there is one, into ``out``; ``wide`` is of the tiles."""
    config = _WIDE if wide else _NARROW
    if bias is None:
        _plain(rows, weight.t(), out={"D": out}, config=config, tuned=False)
    else:
        _biased(rows, weight.t(), out={"D": out}, config=config, tuned=False, bias=bias)


def added(onto: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, *, wide: bool) -> None:
    """``rows @ weight.T`` added to ``onto`` in place."""
    config = _WIDE if wide else _NARROW
    _added(rows, weight.t(), onto, out={"D": onto}, config=config, tuned=False)
