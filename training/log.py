"""What a run leaves behind to look at: a line for each report, and a plot of the loss and the recalls."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from training.files import replacing

LOG_FILE = "log.csv"
PLOT_FILE = "loss.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """``loss`` is the mean between queries and images since the report before, in nats.

    ``halved`` is not a number in reports that are older than this figure.
    """

    step: int
    seconds: float
    loss: float
    text_to_image: float
    image_to_text: float
    words_to_page: float
    narrowed: float
    halved: float = math.nan


def read_reports(directory: Path) -> list[Report]:
    """What ``write_reports`` wrote there; nothing if there is no log."""
    if not (directory / LOG_FILE).exists():
        return []
    with (directory / LOG_FILE).open(newline="", encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return [Report(step=int(row.pop("step")), **row) for row in rows]


def write_reports(directory: Path, reports: list[Report]) -> None:
    """``log.csv`` and ``loss.png`` of the whole run so far."""
    if not reports:
        return
    rows = [asdict(report) for report in reports]
    with (
        replacing(directory / LOG_FILE) as fresh,
        fresh.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: round(value, 5) for name, value in row.items()} for row in rows)
    # A second or more, and only runs that have something to draw need it.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [report.step for report in reports]
    figure, left = pyplot.subplots(figsize=(8, 4.5), dpi=110)
    left.plot(steps, [report.loss for report in reports], color="black", label="loss, queries and images")
    left.set_xlabel("step")
    left.set_ylabel("InfoNCE loss (nats)")
    left.set_ylim(bottom=0)
    right = left.twinx()
    for name, label in (
        ("text_to_image", "text to image"),
        ("image_to_text", "image to text"),
        ("words_to_page", "words to page"),
        ("narrowed", "image and text"),
        ("halved", "picture of half the size"),
    ):
        right.plot(steps, [row[name] for row in rows], label=f"recall@1, {label}")
    right.set_ylabel("recall@1, held-out")
    right.set_ylim(0, 1.02)
    figure.legend(loc="center right", bbox_to_anchor=(0.9, 0.5), fontsize="small")
    figure.tight_layout()
    with replacing(directory / PLOT_FILE) as fresh:
        figure.savefig(fresh, format="png")
    pyplot.close(figure)
