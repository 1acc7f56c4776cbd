"""A worker fetches nothing and reads no files, whatever a request names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.dynamo_model import CarriedMedia
from tessera.errors import MediaFetchError
from tessera.frontend.media import MediaPolicy
from tessera.frontend.request import ImageSource
from tessera.tasks import Deadline
from tests.e2e.inputs import image_input, picture


async def test_only_what_the_request_carries_is_taken(tmp_path: Path) -> None:
    data = picture(1)
    (tmp_path / "picture.png").write_bytes(data)
    # Even where the policy is as open as it can be.
    media = CarriedMedia(MediaPolicy(allow_private=True, allowed_local_path=tmp_path))
    for url in ("http://127.0.0.1:1/a.png", "https://example.org/a.png", f"file://{tmp_path}/picture.png"):
        with pytest.raises(MediaFetchError, match=r"input\[2\]"):
            await media.load(ImageSource(url=url, param="input[2]"), row_width=8, deadline=Deadline.after(5))
    url = image_input(data)[0]["image_url"]["url"]  # type: ignore[index]
    loaded = await media.load(ImageSource(url=url, param="input"), row_width=8, deadline=Deadline.after(60))
    assert loaded.data == data
    await media.close()
