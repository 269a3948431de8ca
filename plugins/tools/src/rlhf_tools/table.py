"""Tables that commands print."""

from collections.abc import Sequence


def print_table(table: Sequence[Sequence[str]]) -> None:
    """Print lines of columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
