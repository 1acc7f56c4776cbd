"""Tessera: a disaggregated service that turns text and images into vectors.

``Embedder`` does it in a Python program, without a service.
"""

__version__ = "0.1.0"
__all__ = ["EmbeddedOutputs", "Embedder", "Ranked", "SparseVector", "__version__"]

# As type checkers read it; ``typing`` is not imported for it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from tessera.embedder import EmbeddedOutputs, Embedder, Ranked, SparseVector
else:

    def __getattr__(name: str) -> object:
        """Import what is asked for: NumPy alone takes longer than this package's import may."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tessera import embedder

        return getattr(embedder, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
