"""What all images of one request may weigh together."""

from __future__ import annotations

from tessera.errors import PayloadTooLarge


class MediaBudget:
    """Counts bytes while they arrive, so that many images cannot fill the memory side by side."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def take(self, nbytes: int, *, param: str) -> None:
        """Raises ``PayloadTooLarge`` naming ``param`` when the request's images are too many bytes."""
        self._left -= nbytes
        if self._left < 0:
            raise PayloadTooLarge(
                f"{param}: the images of this request are larger than {self._limit} bytes together",
                param=param,
            )
