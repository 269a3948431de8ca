"""Templates of Jinja, such as the model card, and how they and tables write numbers."""

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml


def filled(path: Path, **values: Any) -> str:
    """Return a template with `values`; in HTML every text is escaped."""
    return _template(path).render(values)


@cache
def _template(path: Path) -> Any:
    from jinja2 import Environment, FileSystemLoader, select_autoescape  # late: start-up time

    environment = Environment(
        loader=FileSystemLoader(path.parent), autoescape=select_autoescape(),
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["number"] = number
    environment.filters["yaml"] = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)
    return environment.get_template(path.name)


def number(value: object) -> str:
    """Return a value in few digits, as in `0.5374`, `12,345` and `32M`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.4g}B"
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if size < 1e-4 else f"{value:.4g}"
