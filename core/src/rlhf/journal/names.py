"""The names of a loss's terms and metrics: the same on all ranks and in every step.

Ranks reduce their sums in one collective, by position. With a name more on one rank, the others
would add up different things, or all would wait until the process group's timeout.
"""

from collections.abc import Mapping, Sequence

from attrs import define, field, frozen
from torch import Size

from rlhf.engine import Mesh
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.journal.sums import RESERVED, TERM, Sums

REMEDY = "return it for every micro-batch, also for one without rows"


@frozen
class Names:
    """What one rank's losses name in a step or evaluation."""

    terms: dict[str, str]
    metrics: dict[str, tuple[str, Size]]

    def describe(self) -> dict[str, str]:
        """Return each name with what it is per and, if its sum has a dimension, its shape."""
        texts = {f"loss {name}": f"per {per!r}" for name, per in self.terms.items()}
        for name, (per, shape) in self.metrics.items():
            texts[f"metric {name!r}"] = f"per {per!r}" + f" of shape {list(shape)}" * bool(shape)
        return texts


@define
class NameCheck:
    """The names that `loss` used when this was first called."""

    trainer: str
    mesh: Mesh
    _names: Names | None = field(default=None, init=False)

    def check(self, sums: Sums) -> None:
        """Raise RLHFError if the names differ between ranks or from those of the first call, or if
        one is core's own. Only the first call is collective."""
        own = Names(sums.terms, sums.metrics)
        if self._names is None:
            self._names = self._agreed(self.mesh.gather(own))
        elif own != self._names:
            places = {"in the first step": self._names, "now": own}
            raise RLHFError(self._text("in every step", places))
        sums.order_metrics(self._names.metrics)

    def _agreed(self, by_rank: Sequence[Names]) -> Names:
        for name in (name for names in by_rank for name in names.metrics):
            if name in RESERVED or name.startswith(TERM):
                raise SameOnAllRanks(
                    f"trainer {self.trainer!r}: loss() returns a metric {name!r}, a name that core "
                    "uses itself; rename it"
                )
        if any(names != by_rank[0] for names in by_rank):
            places = {f"on rank {rank}": names for rank, names in enumerate(by_rank)}
            raise SameOnAllRanks(self._text("on all ranks", places))
        return by_rank[0]

    def _text(self, where: str, places: Mapping[str, Names]) -> str:
        return (
            f"trainer {self.trainer!r}: loss() must name the same terms and metrics {where}, but "
            f"{differences(places)}; {REMEDY}"
        )


def differences(places: Mapping[str, Names]) -> str:
    """Return every name that is not the same in all places, with what it is in each."""
    texts = {place: names.describe() for place, names in places.items()}
    found = []
    for name in dict.fromkeys(name for text in texts.values() for name in text):
        by_text: dict[str, list[str]] = {}
        for place, text in texts.items():
            by_text.setdefault(text.get(name, "missing"), []).append(place)
        if len(by_text) > 1:
            each = (f"{text} {', '.join(where)}" for text, where in by_text.items())
            found.append(f"{name} is {' and '.join(each)}")
    return "; ".join(found)
