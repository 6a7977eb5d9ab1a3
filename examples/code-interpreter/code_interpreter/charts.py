"""The data of a Matplotlib figure, as E2B's clients know charts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import date

import numpy
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection
from matplotlib.dates import DateLocator, num2date
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch, Rectangle, Wedge
from matplotlib.text import Text

Chart = dict[str, object]
Series = tuple[object, Iterable[object], Iterable[object]]
UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")


def chart_of(figure: Figure) -> Chart | None:
    """None for a figure without data; a chart of charts for one with several axes."""
    axes = figure.get_axes()
    if not any(ax.has_data() for ax in axes):
        return None
    if len(axes) == 1:
        return _chart(axes[0])
    above = figure._suptitle
    title = above.get_text() if above is not None else None
    return {"type": "superchart", "title": title, "elements": [_chart(ax) for ax in axes]}


def _chart(ax: Axes) -> Chart:
    drawn = [artist for artist in ax._children if not isinstance(artist, Text)]
    lines = [line for line in ax.lines if line.get_transform() == ax.transData]
    if _all(drawn, Line2D):
        series = [(line.get_label(), line.get_xdata(), line.get_ydata()) for line in lines]
        return _points(ax, "line", series)
    if _all(drawn, PathPatch, Line2D):
        return _boxes(ax)
    # A line across the whole axes, as axhline draws one, is no data.
    drawn = [artist for artist in drawn if not isinstance(artist, Line2D) or artist in lines]
    if _all(drawn, PathCollection):
        clouds = [(cloud.get_label(), *zip(*cloud.get_offsets().tolist(), strict=True)) for cloud in drawn]
        return _points(ax, "scatter", clouds)
    if _all(drawn, Wedge):
        pieces = [
            {"label": piece.get_label(), "angle": round(abs(piece.theta2 - piece.theta1), 4), "radius": piece.r}
            for piece in drawn
        ]
        return {"type": "pie", "title": ax.get_title() or None, "elements": pieces}
    if _all(drawn, Rectangle) and ax.containers:
        return _bars(ax)
    return _plane(ax, "unknown")


def _all(drawn: Sequence[Artist], *kinds: type[Artist]) -> bool:
    return bool(drawn) and all(isinstance(artist, kinds) for artist in drawn)


def _plane(ax: Axes, kind: str, *, across: bool = False) -> Chart:
    """What all charts with two axes have; ``across``: drawn from left to right, so that the axes are exchanged."""
    x, y = ax.get_xlabel() or None, ax.get_ylabel() or None
    if across:
        x, y = y, x
    return {
        "type": kind,
        "title": ax.get_title() or None,
        "x_label": x,
        "y_label": y,
        "x_unit": _unit(x),
        "y_unit": _unit(y),
        "elements": [],
    }


def _unit(label: str | None) -> str | None:
    found = UNIT.search(label or "")
    return (found.group(1) or found.group(2)) if found else None


def _points(ax: Axes, kind: str, series: Iterable[Series]) -> Chart:
    elements = [
        {"label": _label(label, number), "points": [[_plain(x), _plain(y)] for x, y in zip(xs, ys, strict=True)]}
        for number, (label, xs, ys) in enumerate(series)
    ]
    scales = _scale("x", ax.xaxis) | _scale("y", ax.yaxis)
    return _plane(ax, kind) | scales | {"elements": elements}


def _label(label: object, number: int) -> str:
    return f"Line {number}" if str(label).startswith("_child") else str(label)


def _scale(name: str, axis: Axis) -> Chart:
    ticks = [float(tick) for tick in axis.get_ticklocs()]
    labels = [label.get_text() for label in axis.get_ticklabels()]
    scale = axis.get_scale()
    shown: list[float | str] = list(ticks)
    if isinstance(axis.get_major_locator(), DateLocator):
        scale, shown = "datetime", [num2date(tick).isoformat() for tick in ticks]
    elif scale == "linear" and labels and ticks == list(range(len(ticks))) and _named(ticks, labels):
        scale = "categorical"
    return {f"{name}_ticks": shown, f"{name}_tick_labels": labels, f"{name}_scale": scale}


def _named(ticks: Sequence[float], labels: Sequence[str]) -> bool:
    return all(label and label != f"{tick:g}" for tick, label in zip(ticks, labels, strict=True))


def _bars(ax: Axes) -> Chart:
    elements = []
    across = False
    for number, group in enumerate(ax.containers):
        across = getattr(group, "orientation", "vertical") == "horizontal"
        axis = ax.yaxis if across else ax.xaxis
        label = group.get_label()
        names = dict(zip(axis.get_ticklocs(), [text.get_text() for text in axis.get_ticklabels()], strict=True))
        for bar in group:
            middle = bar.get_y() + bar.get_height() / 2 if across else bar.get_x() + bar.get_width() / 2
            elements.append(
                {
                    "label": next((names[tick] for tick in names if math.isclose(tick, middle)), f"{middle:g}"),
                    "group": f"Group {number}" if label.startswith("_") else label,
                    "value": _plain(bar.get_width() if across else bar.get_height()),
                }
            )
    return _plane(ax, "bar", across=across) | {"elements": elements}


def _boxes(ax: Axes) -> Chart:
    """Each box with the lines that lie within its breadth: its median, its whiskers, what lies outside."""
    corners = [patch.get_path().vertices for patch in ax.patches]
    centres = [box.mean(axis=0) for box in corners]
    across = len(corners) > 1 and len({round(float(centre[0]), 9) for centre in centres}) == 1
    at, along = (1, 0) if across else (0, 1)
    names = [text.get_text() for text in (ax.yaxis if across else ax.xaxis).get_ticklabels()]
    elements = []
    for number, box in enumerate(corners):
        left, right = box[:, at].min(), box[:, at].max()
        low, high = float(box[:, along].min()), float(box[:, along].max())
        median, least, most, outliers = (low + high) / 2, low, high, []
        for line in ax.lines:
            data = numpy.asarray(line.get_xydata(), dtype=float)
            if not len(data) or data[:, at].min() < left or data[:, at].max() > right:
                continue
            values = data[:, along]
            if line.get_linestyle() == "None":
                outliers += values.tolist()
            elif len(values) == 2 and values[0] == values[1] and low <= values[0] <= high:
                # Where box and cap meet, the cap is the narrower.
                if math.isclose(data[1, at] - data[0, at], right - left):
                    median = float(values[0])
            else:
                least, most = min(least, float(values.min())), max(most, float(values.max()))
        elements.append(
            {
                "label": names[number] if number < len(names) else str(number),
                "min": least,
                "first_quartile": low,
                "median": median,
                "third_quartile": high,
                "max": most,
                "outliers": outliers,
            }
        )
    return _plane(ax, "box_and_whisker", across=across) | {"elements": elements}


def _plain(value: object) -> object:
    """As JSON has it."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, numpy.datetime64):
        return str(value.astype("datetime64[s]"))
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
