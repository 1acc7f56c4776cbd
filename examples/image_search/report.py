"""The results as one HTML file that needs nothing else, not even a script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from image_search.errors import SearchError
from image_search.folder import shown
from image_search.index import Hit
from image_search.query import Query
from image_search.thumbnail import jpeg, thumbnail

_STYLE = """
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
li a { display: grid; place-items: center; height: 11rem; background: var(--ground); color: var(--quiet); }
li img { max-width: 100%; max-height: 11rem; }
a:focus-visible { outline: 3px solid var(--accent); outline-offset: -3px; }
.about { padding: .5rem .75rem .75rem; }
.score { display: flex; justify-content: space-between; color: var(--ink); font-weight: 600;
  font-size: 1rem; font-variant-numeric: tabular-nums; }
"""


def write_report(path: Path, query: Query, hits: Sequence[Hit], model: str) -> None:
    """Raises ``SearchError`` when ``path`` cannot be written."""
    style = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    # Names of files come from anywhere: they are escaped, and nothing in this page may run or load.
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{style}'"
    title = escape(query.text or f"like {shown(Path(query.image.name)) if query.image else ''}")
    asked = _picture(query.image, "the picture of the query", 320) if query.image else ""
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    page = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{_STYLE}</style>
<header>{asked}<div><h1>{title}</h1>
<p>{len(hits)} results of {escape(model)}, by cosine; {made}</p></div></header>
<main><ol>
{"".join(_entry(place, hit) for place, hit in enumerate(hits, 1))}</ol></main>
</html>
"""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SearchError(f"{path}: cannot be written: {error.strerror}") from error


def _entry(place: int, hit: Hit) -> str:
    first = hit.paths[0]
    name = escape(shown(Path(first.name)))
    others = "".join(f"<p>also {escape(shown(other))}</p>" for other in hit.paths[1:4])
    link = escape(first.as_uri())
    return f"""<li><a href="{link}">{_picture(first, shown(Path(first.name)), 400)}</a>
<div class="about"><p class="score"><span>{place}.</span><span>{hit.score:.3f}</span></p>
<p title="{escape(shown(first))}">{name}</p>{others}</div></li>
"""


def _picture(path: Path, text: str, size: int) -> str:
    small = thumbnail(path, size, size)
    if small is None:
        return "<span>the file cannot be read</span>"
    data = base64.b64encode(jpeg(small)).decode()
    return f'<img alt="{escape(text)}" src="data:image/jpeg;base64,{data}">'
