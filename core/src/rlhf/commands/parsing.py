"""Arguments that several commands take."""

import argparse
import math
from collections.abc import Callable
from typing import Any


def positive(kind: type[Any]) -> Callable[[str], Any]:
    """Return a parser of numbers above 0 for argparse."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
        return value

    return read
