"""The lines of a file that are code, for tests of how much there is."""

import ast


def code_lines(source: str) -> list[str]:
    """Return the lines that have code, stripped: no comments, docstrings and blank lines."""
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), start=1))
    return [line for number, line in lines if line[:1] not in ("", "#") and number not in texts]
