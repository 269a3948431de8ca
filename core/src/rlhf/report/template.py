"""The page and the card are templates of Jinja, filled here. rlhf formats numbers."""

from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, select_autoescape

from rlhf.report.chart import number


def filled(name: str, **values: Any) -> str:
    """Return a template of this folder with `values`; in HTML every text is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape(),
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    as_yaml = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)
    environment.filters |= {"number": number, "clock": clock, "yaml": as_yaml}
    return environment.get_template(name).render(values)


def clock(seconds: float) -> str:
    """Return a duration, such as 1 h 02 min."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
