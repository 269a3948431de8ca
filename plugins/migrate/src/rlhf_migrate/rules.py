"""Carries out the rules of keys: our settings, and remarks on those that are not the same."""

import json
import math
from collections.abc import Hashable, Mapping
from typing import Any

from attrs import define, field

from rlhf.errors import RLHFError
from rlhf_migrate.foreign import Rule


@define
class Migration:
    """Our settings, and remarks on those that are not the same."""

    trainer: str
    title: str
    """The other project and its trainer, as a reader knows them."""
    settings: dict[str, Any] = field(factory=dict)
    """Dotted name: value."""
    origins: dict[str, str] = field(factory=dict)
    """Dotted name: the keys that it comes from."""
    notes: dict[str, str] = field(factory=dict)
    """What differs, by key."""
    lost: dict[str, str] = field(factory=dict)
    """Keys that change what is learned and have no counterpart, with a remark or without."""
    incomplete: dict[str, str] = field(factory=dict)
    """Keys whose value the file does not have, with a remark."""
    factors: dict[str, int] = field(factory=dict)
    """Keys whose product is the batch size of a device."""
    unneeded: list[str] = field(factory=list)
    unknown: list[str] = field(factory=list)

    def set(self, name: str, value: Any, origin: str) -> None:
        """Set one of our settings."""
        self.settings[name] = value
        self.origins[name] = origin

    def drop(self, name: str) -> Any:
        """Remove a setting, and return its value."""
        self.origins.pop(name, None)
        return self.settings.pop(name, None)


def apply(migration: Migration, key: str, value: Any, rule: Rule, origin: str) -> None:
    """Carry out the rule of one key."""
    if value in rule.off:
        return
    if rule.kind == "unneeded":
        migration.unneeded.append(key)
    elif rule.kind == "lost":
        migration.lost[f"{key} {short(value)}"] = rule.note
    elif rule.kind == "factor":
        migration.factors[key] = _factor(key, value)
    elif rule.kind == "set":
        _set(migration, key, value, rule, origin)
    if rule.note and rule.values is None and rule.kind != "lost" and origin == key:
        migration.notes[f"{key} {short(value)}"] = rule.note


def _factor(key: str, value: Any) -> int:
    """Return a factor of the batch size. Raises RLHFError if it is not a whole number."""
    number = number_of(key, value)
    if number % 1:
        raise RLHFError(f"{key} is {value!r}; write the whole number that was used")
    return int(number)


def number_of(key: str, value: Any) -> float:
    """Return the value of a key. Raises RLHFError if it is not a number."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RLHFError(f"{key} is {value!r}; write the number that was used")
    return number


def _set(migration: Migration, key: str, value: Any, rule: Rule, origin: str) -> None:
    if rule.values is None:
        ours: Mapping[str, Any] = {rule.ours: value}
    else:
        known = []
        for each in value if isinstance(value, list) and value else [value]:
            if not isinstance(each, Hashable) or each not in rule.values:
                migration.lost[f"{key} {short(each)}"] = rule.note
            elif rule.values[each] != {}:
                known.append(rule.values[each])
        if not known:
            return
        only = known[0] if len(known) == 1 else known
        ours = only if isinstance(only, Mapping) else {rule.ours: only}
    for name, each in ours.items():
        if name == "optim.betas" and key[-1] in "12":
            betas = list(migration.settings.get(name, [0.9, 0.999]))
            betas[key.endswith("2")] = each
            each = betas
        migration.set(name, each, origin)


def short(value: Any) -> str:
    """Return a value as remarks show it."""
    text = json.dumps(value, default=str).strip('"')
    return text if len(text) <= 40 else text[:37] + "..."
