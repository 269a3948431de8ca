"""What an item of the list `rewards` in a trainer's section says."""

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

from attrs import field, frozen, validators

from rlhf.plugin import check_rules, documented

RULES = ("exact", "number", "boxed", "format", "soft_overlong", "repetition")
"""The functions in `rlhf_rollouts.rewards.rules`."""


def _names_function(instance: object, attribute: object, value: str) -> None:
    if value not in RULES and not all(value.rpartition(":")[::2]):
        near = difflib.get_close_matches(value, RULES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"{value!r} is not a shipped rule; {meant}available: {', '.join(RULES)}, and functions "
            "of yours as module:name or file.py:name"
        )


def _is_address(instance: object, attribute: object, value: str) -> None:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{value!r} is not the address of a server, such as http://HOST:8000")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "must not have a user name or a token, since run folders record settings; set the "
            "token in the environment variable RLHF_TOKEN"
        )


def address(url: str) -> str:
    """Return the address of a server with the path to which answers are sent."""
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1/score"


@documented
@frozen(kw_only=True)
class RewardSpec:
    """One reward: a function, a server or a model that scores answers."""

    not_offered: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("column", "pattern", "max_tokens", "buffer_tokens", "size", "penalty"),
        "is an option of a rule; write it into `options`",
    )
    function: str | None = field(default=None, validator=validators.optional(_names_function))
    """A shipped rule (exact, number, boxed, format, soft_overlong, repetition), or a function with
    the signature of TRL's reward functions, as `module:name` or `file.py:name`."""
    url: str | None = field(default=None, validator=validators.optional(_is_address))
    """Address of a server that scores answers as `rlhf serve` does at /v1/score. Its token is read
    from the environment variable RLHF_TOKEN."""
    model: str | None = None
    """Folder of a reward model, as `rlhf run rm` exports it."""
    weight: float = 1.0
    """Factor of this reward in the total."""
    name: str | None = None
    """What metrics and errors call it; default: the name of the function, `server` or `model`."""
    options: dict[str, Any] = field(factory=dict)
    """Keyword arguments of the function beside those of TRL, such as {column: solution} for number
    and boxed, or {pattern: "..."} for format."""
    when: dict[str, Any] = field(factory=dict)
    """Score only answers of rows with these values by column, such as {source: gsm8k}; a list names
    several values. For other answers the reward counts as unscorable."""

    def __attrs_post_init__(self) -> None:
        kinds = [name for name in ("function", "url", "model") if getattr(self, name) is not None]
        check_rules(
            ("a reward needs one of function, url and model", not kinds),
            (f"a reward has only one of {' and '.join(kinds)}; add another reward", kinds[1:]),
            (
                "options are arguments of a function; remove them",
                self.options and not self.function,
            ),
        )

    @property
    def label(self) -> str:
        """What metrics and errors call this reward."""
        if self.function:
            default = self.function.rpartition(":")[2].rpartition(".")[2]
        else:
            default = "server" if self.url else "model"
        return self.name or default
