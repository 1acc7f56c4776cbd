"""When kept vectors are taken for those that the workers would give now."""

from __future__ import annotations

from tessera import wire
from tessera.frontend.serving.result_cache import KeyPrefix


def worker(dtype: str = "bfloat16", rounding: str = "", tokens: int = 0) -> wire.WorkerInfo:
    return wire.WorkerInfo(
        role="embed",
        model="m",
        fingerprint="f",
        dtype=dtype,
        rounding=rounding,
        width=4,
        row_width=4,
        images=True,
        tokens=tokens,
    )


def test_it_changes_with_how_workers_compute_and_with_nothing_else() -> None:
    embed, encode = [worker()], [worker()]
    prefix = KeyPrefix("f", lambda: embed, lambda: encode)
    plain = prefix()
    embed.append(worker(tokens=5))
    assert prefix() == plain
    embed.clear()
    assert prefix() == plain, "their last ones count"
    seen = {plain, KeyPrefix("g", lambda: [worker()], lambda: [worker()])()}
    for component, changed in (
        (embed, worker(rounding="fp8")),
        (encode, worker(rounding="fp8")),
        (encode, worker(rounding="fp8, 2")),
        (embed, worker("float16")),
    ):
        component[:] = [changed]
        assert prefix() not in seen
        seen.add(prefix())
    embed[:] = encode[:] = [worker()]
    assert prefix() == plain
