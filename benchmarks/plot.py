"""A small line chart as PNG, drawn with Pillow, which the service needs anyway."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 900, 520, 80, 50, 40, 180
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#edae49", "#6a4c93", "#444444", "#00798c", "#a05195")


@dataclass(frozen=True, slots=True)
class Point:
    series: str
    x: float
    y: float


def plot(path: Path, points: Sequence[Point], label: str) -> None:
    """Requests a second over ``label``, one line for each series; both axes begin at 0."""
    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    most_x = max((point.x for point in points), default=1.0) or 1.0
    most_y = max((point.y for point in points), default=1.0) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (_WIDTH - _LEFT - _RIGHT) * x / most_x
        up = (_HEIGHT - _TOP - _BOTTOM) * y / most_y
        return _LEFT + across, _HEIGHT - _BOTTOM - up

    for step in range(6):
        x, y = most_x * step / 5, most_y * step / 5
        draw.line([place(0, y), place(most_x, y)], fill="#dddddd")
        draw.text((8, place(0, y)[1] - 6), f"{y:,.0f}", fill="black")
        draw.text((place(x, 0)[0] - 10, _HEIGHT - _BOTTOM + 8), f"{x:,.0f}", fill="black")
    draw.text((_LEFT, 12), "requests/s", fill="black")
    draw.text((_WIDTH // 2 - 60, _HEIGHT - 22), label, fill="black")
    series: defaultdict[str, list[Point]] = defaultdict(list)
    for point in points:
        series[point.series].append(point)
    for number, (name, found) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        line = [place(point.x, point.y) for point in sorted(found, key=lambda point: point.x)]
        draw.line(line, fill=colour, width=2)
        for x, y in line:
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)
        draw.text((_WIDTH - _RIGHT + 12, _TOP + 18 * number), name, fill=colour)
    image.save(path)
