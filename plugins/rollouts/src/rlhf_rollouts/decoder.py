"""The decode step: all rows read one token and draw the next, without waiting for the device."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from transformers import Cache

from rlhf.trainer import Sample
from rlhf_rollouts.cache import Cursor, RowCache, prompt_cache
from rlhf_rollouts.graphs import Graphs
from rlhf_rollouts.noise import draw, seed_tensor


class Forward:
    """A forward of a transformers model, perhaps under peft, with a cache."""

    def __init__(self, model: Any, causal: Any) -> None:
        self.causal = causal
        self._model = model
        self._known = inspect.signature(causal.forward).parameters
        # transformers 5.17 calls it `past_key_values`.
        self._cache = "cache" if "cache" in self._known else "past_key_values"
        self.stopped = False
        """Whether the last forward has raised an error."""

    @property
    def takes_cache(self) -> bool:
        """Return whether the model has an argument for a cache."""
        return self._cache in self._known

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Return the logits after the last column of tokens [rows, T] at `positions` [rows, T], of
        the whole vocabulary [rows, V]."""
        options: dict[str, Any] = {self._cache: cache}
        if "position_ids" in self._known:
            options["position_ids"] = positions
        if "logits_to_keep" in self._known:
            options["logits_to_keep"] = 1
        return self._logits(tokens, use_cache=True, **options)[:, -1]

    def plain(self, tokens: Tensor) -> Tensor:
        """Return the logits of whole rows [rows, T] without a cache [rows, T, V]."""
        return self._logits(tokens, use_cache=False)

    def _logits(self, tokens: Tensor, **options: Any) -> Tensor:
        self.stopped = True
        outputs = self._model(input_ids=tokens, return_dict=True, **options)
        self.stopped = False
        logits: Tensor = outputs.logits
        return logits

    def read(self, prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> Cache:
        """Return the cache of prompts, which are padded at the end."""
        length = max(1, *map(len, prompts))
        rows = [[*prompt, *[pad] * (length - len(prompt))] for prompt in prompts]
        cache = prompt_cache(self.causal)
        places = torch.arange(length, device=device).expand(len(rows), -1)
        self(torch.tensor(rows, device=device), places, cache)
        return cache


@frozen(kw_only=True)
class Limits:
    """What ends an answer, and how its tokens are drawn."""

    ends: Tensor
    """Tokens that end an answer, int64 [n]."""
    temperature: float
    tokens: int | None
    """Only the first tokens of the vocabulary are drawn; None for all."""


@frozen(kw_only=True)
class Start:
    """An answer that a row begins."""

    prompt: Sequence[int]
    seed: int
    room: int
    """The most tokens that it may have."""
    inputs: Mapping[str, Any] = field(factory=dict)
    """The keyword arguments of the model for the prompt, in data with images."""


@frozen(kw_only=True, eq=False)
class Rows:
    """The rows of a batch on the device. A row that has ended continues, so that no step depends on
    one, and what it then draws is not kept."""

    forward: Forward
    cache: RowCache
    limits: Limits
    tokens: Tensor
    """The token that each row reads next, int64 [rows]."""
    seeds: Tensor
    num_drawn: Tensor
    """Tokens that each answer has, int64 [rows]."""
    room: Tensor
    """The most that it may have."""
    last: Tensor
    """The highest position that it may read: the last token is not read, nor are positions after
    it, which the model need not have."""
    ended: Tensor
    """Whether it is complete, bool [rows]."""
    drawn: Tensor
    """The tokens of the answers [rows, most + 1]; the last column takes what is not kept."""
    logprobs: Tensor
    """Their log-probabilities, float32."""
    graphs: Graphs = field(factory=Graphs)

    @classmethod
    def blank(
        cls, forward: Forward, prompts: Cache, limits: Limits, *, rows: int, length: int, most: int,
        graphs: Graphs,
    ) -> "Rows":  # fmt: skip
        """Return `rows` rows without answers, for at most `length` tokens each, of which at most
        `most` are drawn. The cache has layers as `prompts`."""
        device = limits.ends.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        cursor = Cursor(zeros(rows))
        return cls(
            forward=forward, cache=RowCache(prompts, cursor, rows, length), limits=limits,
            tokens=zeros(rows), seeds=zeros(rows), num_drawn=zeros(rows), room=zeros(rows),
            last=zeros(rows), ended=torch.ones(rows, dtype=torch.bool, device=device),
            drawn=zeros(rows, most + 1), logprobs=zeros(rows, most + 1, dtype=torch.float32),
            graphs=graphs,
        )  # fmt: skip

    def start(
        self, rows: Sequence[int], answers: Sequence[Start], prompts: Cache, sources: Sequence[int]
    ) -> None:
        """Begin answers in `rows`. Their prompts, all but the last token, are those at `sources` in
        the cache `prompts`."""
        lengths = [len(answer.prompt) - 1 for answer in answers]
        rooms = [answer.room for answer in answers]
        table = torch.tensor(
            [rows, sources, lengths, rooms, [answer.prompt[-1] for answer in answers]],
            device=self.tokens.device,
        )
        places, origins, ends, room, tokens = table
        self.cache.put(places, prompts, origins, ends)
        self.cache.cursor.positions[places] = ends
        self.tokens[places] = tokens
        self.seeds[places] = seed_tensor([answer.seed for answer in answers], self.seeds.device)
        self.num_drawn[places] = 0
        self.room[places] = room
        self.last[places] = ends + room - 1
        self.ended[places] = False

    @property
    def length(self) -> int:
        """Return the most tokens of a row."""
        return self.cache.length

    def take(self, rows: Sequence[int]) -> list[Sample]:
        """Return the answers in `rows`, which have ended, and free the rows. Waits for the
        device."""
        places = torch.tensor(rows, device=self.tokens.device)
        # A free row reads what every step reads.
        self.cache.cursor.positions[places] = 0
        self.last[places] = 0
        sizes: list[int] = self.num_drawn[places].tolist()
        longest = max(sizes)
        ends = set(self.limits.ends.tolist())
        drawn = zip(
            sizes, self.drawn[places, :longest].tolist(), self.logprobs[places, :longest].tolist(),
            strict=True,
        )  # fmt: skip
        return [
            Sample(tokens[:size], logprobs[:size], finished=tokens[size - 1] in ends)
            for size, tokens, logprobs in drawn
        ]

    def step(self, used: int) -> None:
        """Draw the next token of every row, reading the first `used` keys."""
        self.cache.cursor.used = used
        self.graphs.run(used, self._step)

    def _step(self) -> None:
        positions = self.cache.cursor.positions
        logits = self.forward(self.tokens[:, None], positions[:, None], self.cache)
        limits = self.limits
        tokens, logprobs = draw(
            logits, self.seeds, self.num_drawn, temperature=limits.temperature,
            tokens=limits.tokens,
        )  # fmt: skip
        unkept = self.drawn.shape[1] - 1
        column = torch.where(self.ended, unkept, self.num_drawn)[:, None]
        self.drawn.scatter_(1, column, tokens[:, None])
        self.logprobs.scatter_(1, column, logprobs[:, None])
        self.num_drawn.add_(~self.ended)
        self.ended.logical_or_((tokens[:, None] == limits.ends).any(1))
        self.ended.logical_or_(self.num_drawn >= self.room)
        self.tokens.copy_(tokens)
        positions.copy_(torch.minimum(positions + 1, self.last))
