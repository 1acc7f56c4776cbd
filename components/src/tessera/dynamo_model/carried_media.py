"""Images that a request carries itself, and no others."""

from __future__ import annotations

from tessera.errors import MediaFetchError
from tessera.frontend.api.request import ImageSource
from tessera.frontend.deadline import Deadline
from tessera.frontend.media import MediaBudget, MediaLoader


class CarriedMedia(MediaLoader):
    """Takes data URLs, under the frontend's policy; a worker fetches nothing and reads no files."""

    async def read(self, source: ImageSource, *, deadline: Deadline, budget: MediaBudget) -> bytes:
        if source.url[:5].lower() != "data:":
            raise MediaFetchError(f"{source.param}: only data URLs are taken here", param=source.param)
        return await super().read(source, deadline=deadline, budget=budget)
