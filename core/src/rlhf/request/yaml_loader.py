"""YAML without what surprises in it: keys are text, and each is there once."""

import re
from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"
TEXT = "tag:yaml.org,2002:str"
OCTAL_OR_CLOCK = re.compile(r"[-+]?(0[0-7_]+|.*:.*)")
"""Numbers that YAML 1.1 reads in base 8, such as 010, or in base 60, such as 12:30:45."""


def parse_yaml(text: str) -> Any:
    """Return the content of a YAML document. Raises yaml.YAMLError for any that cannot be read."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ArithmeticError, ValueError) as error:  # A character that does not exist, in quotes.
        raise yaml.YAMLError(str(error)) from None


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse duplicate keys, of which YAML would silently take the last, and read keys as they
        are written: `on` is not true."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _error(key, f"duplicate key '{key.value}'")
                seen.add(key.value)
                key.tag = key.tag if key.tag == MERGE else TEXT
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        """Refuse a list or a mapping that contains itself."""
        self.deep_construct = True
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Refuse a scalar that is not what its form or its tag says, such as 2026-13-01."""
        try:
            value = super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError):
            kind = node.tag.rpartition(":")[2]
            text = str(node.value)[:40]
            raise _error(node, f"{text} is not a valid {kind}; quote it if it is text") from None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and OCTAL_OR_CLOCK.fullmatch(node.value):
            problem = f"{node.value} is the number {value} in YAML; quote it, or write {value}"
            raise _error(node, problem)
        return value


def _error(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
