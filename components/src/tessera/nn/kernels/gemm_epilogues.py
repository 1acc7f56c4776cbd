"""The one module that imports quack; loading it takes seconds, so only the functions of ``gemm`` do."""

# The library's epilogues are traced, not run: their parameters are symbols without a type.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
from quack.activation import gelu_erf, gelu_tanh_approx, quick_gelu, swiglu
from quack.epilogue import gemm_epilogue
from quack.epilogue.math import unpack
from quack.epilogue.ops import ColVecLoad, RowVecLoad
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


_SCALES = {"rows": ColVecLoad("rows"), "columns": RowVecLoad("columns")}


@gemm_epilogue(outputs=("postact",), ops=_SCALES, mode="acc_pair")
@_wherever_it_lies
def _gated_fp8(acc, rows, columns):
    gate, up = unpack(acc * rows * columns)
    return {"postact": swiglu(gate, up)}


def _activating(activation: Any) -> Any:
    """A product of FP8 with its bias and activation behind it, over the scale of what is stored."""

    @gemm_epilogue(ops=_SCALES | {"bias": RowVecLoad("bias")})
    @_wherever_it_lies
    def epilogue(acc, rows, columns, bias, scale):
        return {"D": activation(acc * rows * columns + bias) * (1.0 / scale)}

    return epilogue


# The library finds an epilogue again by the name that a module has it under.
_gelu_erf_fp8 = _activating(gelu_erf)
_gelu_tanh_fp8 = _activating(gelu_tanh_approx)
_quick_gelu_fp8 = _activating(quick_gelu)
_ACTIVATING_FP8 = {
    "gelu_erf": _gelu_erf_fp8,
    "gelu_tanh_approx": _gelu_tanh_fp8,
    "quick_gelu": _quick_gelu_fp8,
}


def _launch_fp8(
    epilogue: Any,
    values: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    given: dict[str, Any],
    *,
    wide: bool,
    side_by_side: tuple[str, ...] = (),
) -> None:
    """Multiply with sums of 14 bits, as cuBLAS is asked for them; exact ones take 3.6 times as long."""
    config = _WIDE if wide else _NARROW
    epilogue.gemm(
        values,
        weight,
        out,
        epi_args=given,
        tile_M=config.tile_m,
        tile_N=config.tile_n,
        pingpong=config.pingpong,
        cluster_M=config.cluster_m,
        cluster_N=config.cluster_n,
        concat_layout=side_by_side or None,
        post_init_attrs=(("fp8_slow_accum", False),),
    )


def gated_fp8(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, out: torch.Tensor
) -> None:
    """Gate a product in FP8 into bfloat16 ``out``; ``scales`` multiply its rows, ``columns`` its columns."""
    given = {"rows": scales.view(1, -1), "columns": columns.view(1, -1), "postact": out}
    _launch_fp8(_gated_fp8, values, weight, None, given, wide=True, side_by_side=("B", "columns"))


def activated_fp8(
    values: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    scale: torch.Tensor | float,
    out: torch.Tensor,
) -> None:
    """The activation of a product in FP8 with its bias, over ``scale``, into ``out``: bfloat16 or e4m3."""
    given = {"rows": scales.view(1, -1), "columns": columns.view(1, -1), "bias": bias.view(1, -1)}
    # e4m3 is stored at the full rate from narrow tiles alone: 0.265 ms beside 0.352 of 28672 x 1152 x 4352.
    wide = out.dtype == torch.bfloat16
    _launch_fp8(_ACTIVATING_FP8[activation], values, weight, out, given | {"scale": scale}, wide=wide)


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
