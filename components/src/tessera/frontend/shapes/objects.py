"""Jina's and SGLang's objects: ``{"text": ...}``, ``{"image": ...}``, or both fused into one input."""

from __future__ import annotations

from tessera.frontend.api.content import image_at
from tessera.frontend.api.request import Input
from tessera.frontend.api.values import JsonObject, expected, reject_unknown, string
from tessera.frontend.shapes.scope import Scope


def read_object(value: JsonObject, param: str, scope: Scope) -> Input:
    """``image`` is a URL, a local path, or base64 without a prefix; a null key counts as absent."""
    reject_unknown(value, ("text", "image"), param)
    text, image = value.get("text"), value.get("image")
    if text is None and image is None:
        raise expected(param, "an object with text, image or both", value)
    images = () if image is None else (image_at(image, f"{param}.image", bare=True),)
    words = "" if text is None else scope.text(string(text, f"{param}.text"), f"{param}.text")
    return scope.fused(words, images, param)
