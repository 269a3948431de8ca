"""What the kits prove: a failing test says which promise is broken and where it is documented."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])
BROKEN = "broken promise: "


def promise(text: str, where: str) -> Callable[[Test], Test]:
    """Decorate a test so that what it raises ends with the promise `text`, documented in `where`
    (a page and its heading)."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def kept(*arguments: Any, **named: Any) -> Any:
            try:
                return test(*arguments, **named)
            except Exception as error:
                error.add_note(f"{BROKEN}{text}; see docs/{where}")
                raise

        kept.documented = where  # type: ignore[attr-defined]
        return kept  # type: ignore[return-value]

    return decorate
