"""Takes out of a text what does not belong into a log.

No line is written with such things on purpose. This is for messages that quote others: a library's
exception may name the URL that it was given, or the string that it could not read.
"""

from __future__ import annotations

import re
from typing import Final

# Room for a traceback. Of a longer one the end says what happened, and the beginning where.
MOST_CHARACTERS: Final = 16_384
_HEAD_CHARACTERS: Final = 4096

# Words as long as this are files in base64, keys, or tokens; ids and hashes are shorter.
_LONG = re.compile(r"[A-Za-z0-9+/=_-]{161,}")
_DATA_URL = re.compile(r"\bdata:[^\s,]{0,200},[^\s'\"]*", re.IGNORECASE)
# User and password, query and fragment; the path may say which image it was.
_URL = re.compile(
    r"\b([a-z][a-z0-9+.-]{0,20}://)(?:[^\s/?#'\"]*@)?([^\s?#'\"]*)(?:[?#][^\s'\"]*)?", re.IGNORECASE
)
_CREDENTIALS = re.compile(r"\b(bearer|basic)\s+[^\s'\",;]+", re.IGNORECASE)
_KEY = re.compile(r"\b((?:x-)?api[-_]?key[\"']?\s*[:=]\s*[\"']?)[^\s'\",;]+", re.IGNORECASE)

# Whatever any of these could match; most texts are short and plain, and there are several in a line.
_SUSPECT = re.compile(r"data:|://|bearer|basic|key|[A-Za-z0-9+/=_-]{161}", re.IGNORECASE)


def scrub(text: str) -> str:
    """The text without data URLs, credentials, long encoded words, and queries and fragments of URLs."""
    if len(text) > MOST_CHARACTERS:
        left_out = len(text) - MOST_CHARACTERS
        tail = text[_HEAD_CHARACTERS - MOST_CHARACTERS :]
        text = f"{text[:_HEAD_CHARACTERS]}… ({left_out} characters left out) …{tail}"
    if not _SUSPECT.search(text):
        return text
    text = _DATA_URL.sub("data:…", text)
    text = _URL.sub(r"\1\2", text)
    text = _KEY.sub(r"\1…", text)
    text = _CREDENTIALS.sub(r"\1 …", text)
    return _LONG.sub(lambda match: f"…({len(match[0])} characters)", text)
