"""The names of a loss's terms and metrics: the same on all ranks and in every step.

Ranks reduce their sums in one collective, by position. With a name more on one rank, the others
would add up different things, or all would wait until the process group's timeout.
"""

from collections.abc import Mapping

from attrs import define, field

from rlhf.contract.sums import Sums
from rlhf.engine import Mesh
from rlhf.errors import RLHFError, SameOnAllRanks

REMEDY = "return it for every micro-batch, also for one without rows"


@define
class NameCheck:
    """The names that `loss` used when this was first called."""

    trainer: str
    mesh: Mesh
    _texts: dict[str, str] | None = field(default=None, init=False)

    def check(self, sums: Sums) -> None:
        """Raise RLHFError if the names differ between ranks or from those of the first call. Only
        the first call is collective."""
        texts = describe(sums)
        if self._texts is None:
            self._share(texts)
        elif texts != self._texts:
            places = {"in the first step": self._texts, "now": texts}
            raise RLHFError(self._text("in every step", places))

    def _share(self, texts: dict[str, str]) -> None:
        shares = self.mesh.gather(texts)
        self._texts = shares[0]
        if any(each != self._texts for each in shares):
            places = {f"on rank {rank}": each for rank, each in enumerate(shares)}
            raise SameOnAllRanks(self._text("on all ranks", places))

    def _text(self, where: str, places: Mapping[str, Mapping[str, str]]) -> str:
        return (
            f"trainer {self.trainer!r}: loss() must name the same terms and metrics {where}, but "
            f"{differences(places)}; {REMEDY}"
        )


def describe(sums: Sums) -> dict[str, str]:
    """Return each name with what it is per and, if its sum has a dimension, its shape."""
    texts = {f"loss {name}": f"per {per!r}" for name, per in sums.terms.items()}
    for name, (per, shape) in sums.metrics.items():
        texts[f"metric {name!r}"] = f"per {per!r}" + f" of shape {list(shape)}" * bool(shape)
    return texts


def differences(places: Mapping[str, Mapping[str, str]]) -> str:
    """Return every name that is not the same in all places, with what it is in each."""
    lines = []
    for name in dict.fromkeys(name for texts in places.values() for name in texts):
        by_text: dict[str, list[str]] = {}
        for place, texts in places.items():
            by_text.setdefault(texts.get(name, "missing"), []).append(place)
        if len(by_text) > 1:
            each = (f"{text} {', '.join(where)}" for text, where in by_text.items())
            lines.append(f"{name} is {' and '.join(each)}")
    return "; ".join(lines)
