"""Loaded into each Python kernel: what results look like, and fresh seeds in each copy of the sandbox."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from IPython.core.formatters import BaseFormatter, JSONFormatter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.traitlets import ObjectName, Unicode

#: Another one in each sandbox, and after each start from memory.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DataFormatter(BaseFormatter):
    """The columns of a table."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict

    def __call__(self, value: object) -> object:
        # Who has such a value has imported pandas already; the others shall not wait for it.
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(value, pandas.DataFrame):
            return super().__call__(value)
        # pandas' own JSON knows all of its types.
        columns = json.loads(value.to_json(orient="split", date_format="iso", default_handler=str))
        rows = columns["data"]
        return {str(name): [row[i] for row in rows] for i, name in enumerate(columns["columns"])}


class ChartFormatter(BaseFormatter):
    """The data of a Matplotlib figure."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = dict

    def __call__(self, value: object) -> object:
        figure = sys.modules.get("matplotlib.figure")
        if figure is None or not isinstance(value, figure.Figure):
            return super().__call__(value)
        from code_interpreter.charts import chart_of

        return chart_of(value)


class PlainJsonFormatter(JSONFormatter):
    """Lists and dicts too."""

    def __call__(self, value: object) -> object:
        if isinstance(value, list | dict):
            try:
                # As a client will read it: JSON has no NaN.
                text = json.dumps(value, default=_plain)
                return json.loads(text, parse_constant=lambda _: None), {"expanded": True}
            except (TypeError, ValueError, RecursionError):
                return None
        return super().__call__(value)


def _plain(value: object) -> object:
    """NumPy's numbers and arrays."""
    if callable(convert := getattr(value, "tolist", None)):
        return convert()
    raise TypeError(f"{type(value).__name__} is not for JSON")


class Seeds:
    """Before a cell of a new copy runs, its generators are seeded anew: what was drawn before is not repeated."""

    def __init__(self) -> None:
        self._copy = _boot_id()

    def renew(self, *_: object) -> None:
        """Where this is another copy than at the last cell."""
        if (now := _boot_id()) != self._copy:
            self._copy = now
            random.seed()
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed()


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text()
    except OSError:
        return ""


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Called by IPython."""
    for formatter in (DataFormatter, ChartFormatter, PlainJsonFormatter):
        made = formatter(parent=shell.display_formatter)
        shell.display_formatter.formatters[made.format_type] = made
    shell.events.register("pre_execute", Seeds().renew)
