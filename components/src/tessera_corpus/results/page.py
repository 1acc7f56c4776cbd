"""The results as one HTML file that needs nothing else, not even a script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Final

from PIL import Image

from tessera.errors import OutputFailed
from tessera_corpus.results.entry import Entry, Query

_QUALITY: Final = 82
_STYLE: Final = """
:root { color-scheme: light dark; --ground: #f5f4f0; --plate: #fff; --ink: #1d2327; --quiet: #56616a;
  --line: #d5d8d6; --accent: #0b6e6e; font: 1rem/1.5 system-ui, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181b; --plate: #1d2327; --ink: #e9ecea;
  --quiet: #a6b0b5; --line: #353d43; --accent: #5cc4bd; } }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--ground); color: var(--ink);
  overflow-wrap: anywhere; }
header { display: flex; gap: 1rem; align-items: center; margin-bottom: 1rem; }
header img { max-height: 6rem; max-width: 10rem; border-radius: .5rem; }
h1 { font-size: 1.4rem; margin: 0; }
p { margin: 0; color: var(--quiet); font-size: .9rem; }
ol { list-style: none; margin: 0; padding: 0; display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); }
li { background: var(--plate); border: 1px solid var(--line); border-radius: .5rem; overflow: hidden; }
li:first-child { border-color: var(--accent); box-shadow: 0 0 0 1px var(--accent); }
li a { display: grid; place-items: center; height: 11rem; background: var(--ground); color: var(--quiet);
  text-decoration: none; }
li img { max-width: 100%; max-height: 11rem; }
blockquote { box-sizing: border-box; width: 100%; height: 11rem; margin: 0; padding: .75rem; overflow: hidden;
  font-size: .85rem; color: var(--ink); }
a:focus-visible { outline: 3px solid var(--accent); outline-offset: -3px; }
.about { padding: .5rem .75rem .75rem; }
.score { display: flex; justify-content: space-between; color: var(--ink); font-weight: 600;
  font-size: 1rem; font-variant-numeric: tabular-nums; }
"""


def write_page(path: Path, query: Query, entries: Sequence[Entry], said: str) -> None:
    """``said`` stands below the query; raises ``OutputFailed`` where ``path`` cannot be written."""
    style = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    # Names and texts come from anywhere: they are escaped, and nothing in this page may run or load.
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{style}'"
    title = escape(query.text or f"like {query.picture}")
    asked = "" if query.small is None else _picture(query.small, "the picture of the query")
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    page = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{_STYLE}</style>
<header>{asked}<div><h1>{title}</h1>
<p>{escape(said)}; {made}</p></div></header>
<main><ol>
{"".join(_entry(place, entry) for place, entry in enumerate(entries, 1))}</ol></main>
</html>
"""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise OutputFailed(f"{path}: cannot be written: {error.strerror}") from error


def _entry(place: int, entry: Entry) -> str:
    if entry.picture is not None:
        look = _picture(entry.picture, entry.name)
    elif entry.text:
        look = f"<blockquote>{escape(entry.text)}</blockquote>"
    else:
        look = "<span>nothing to show</span>"
    link = _link(entry)
    below = [f"<p>also {escape(name)}</p>" for name in entry.others[:3]]
    if len(entry.others) > 3:
        below.append(f"<p>and {len(entry.others) - 3} more</p>")
    if entry.note:
        below.append(f"<p>{escape(entry.note)}</p>")
    if entry.picture is not None and entry.text:
        below.append(f"<p>{escape(entry.text[:200])}</p>")
    return f"""<li><a{link}>{look}</a>
<div class="about"><p class="score"><span>{place}.</span><span>{entry.score:.3f}</span></p>
<p>{escape(entry.name)}</p>{"".join(below)}</div></li>
"""


def _link(entry: Entry) -> str:
    """To the file on this machine, and to the page where it has pages."""
    file = Path(entry.source.source).absolute()
    if not file.is_file():
        return ""
    page = "" if entry.source.page is None else f"#page={entry.source.page}"
    return f' href="{escape(file.as_uri() + page)}"'


def _picture(small: Image.Image, text: str) -> str:
    file = BytesIO()
    small.save(file, "JPEG", quality=_QUALITY)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{escape(text)}" src="data:image/jpeg;base64,{data}">'
