"""The engine `vllm`: rank 0 speaks to the server, and all ranks get the answers."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf.engine import Engine, Mesh
from rlhf.errors import SameOnAllRanks
from rlhf.hookspecs import BackendHooks
from rlhf.plugin import Config
from rlhf.rollouts import exported_weights
from rlhf.trainer import Sample
from rlhf_rollout_vllm.agreement import mean_difference, own_logprobs
from rlhf_rollout_vllm.answers import Drawing, draw, score
from rlhf_rollout_vllm.config import VLLMConfig
from rlhf_rollout_vllm.connection import Connection, connect
from rlhf_rollout_vllm.threads import in_background
from rlhf_rollout_vllm.transfer import GB, Transfer

T = TypeVar("T")
CANARY_TOKENS = 32
"""Most tokens of a prompt by which weights are compared."""
EXACT, ROUNDED = 0.001, 0.05
"""Default limits of `canary` in fp32 and in other precisions."""


class VLLM:
    """A vLLM server writes the answers of one engine's model. Weights are sent to it when a forward
    with gradient has been run since they were sent last."""

    def __init__(self, *, config: Config, tokenizer: Any, mesh: Mesh, hooks: BackendHooks) -> None:
        self.config, self.tokenizer, self.mesh, self.hooks = config, tokenizer, mesh, hooks
        self.settings: VLLMConfig = config.rollouts.vllm  # type: ignore[attr-defined]
        self.notes: list[str] = []
        """Lines that the run prints."""
        self.metrics: dict[str, float] = defaultdict(float)
        """See `rlhf.rollouts.RolloutEngine`."""
        self._connection: Connection | None = None
        self._source: Engine | None = None
        """The engine whose model is served."""
        self._moved = True
        """Whether the weights of that engine may have changed since they were sent."""
        self._canary: list[int] = []
        self._agreed = False

    def sample(self, *given: Any, **how: Any) -> list[Sample]:
        """See `rlhf.rollouts.RolloutEngine`."""
        return self.begin(*given, **how)()

    def begin(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        max_new_tokens: int,
        max_tokens: int,
        ends: Sequence[int],
        temperature: float,
    ) -> Callable[[], list[Sample]]:
        """See `rlhf.rollouts.RolloutEngine`. The first answers of a process are there already: they
        are compared with weights that the first step changes."""
        vocabulary = engine.module.tokens or _text_config(engine).vocab_size
        if self._source is None:
            self._open(engine, max_tokens)
            self._canary = canary_text(prompts, vocabulary, max_tokens)
        elif self._source is not engine:
            raise SameOnAllRanks(
                "rollouts.engine vllm serves one model, but this trainer samples from several; use "
                "embedded"
            )
        self._send_weights(engine)
        rooms = [max(1, min(max_new_tokens, max_tokens - len(prompt))) for prompt in prompts]
        drawing = Drawing(
            temperature=temperature, ends=frozenset(ends), vocabulary=vocabulary
        )  # fmt: skip

        def asked(transfer: Transfer) -> list[Sample]:
            return draw(
                transfer, prompts, seeds=seeds, rooms=rooms, drawing=drawing,
                concurrency=self.settings.concurrency,
            )  # fmt: skip

        writing = self._on_server(
            lambda transfer: in_background(partial(asked, transfer)), share=False
        )

        def finish() -> list[Sample]:
            return self.mesh.on_rank_zero(lambda: writing.result())

        if self._agreed:
            return finish
        drawn = finish()
        self._check_agreement(engine, prompts, drawn, temperature)
        self._agreed = True
        return lambda: drawn

    def _open(self, engine: Engine, max_tokens: int) -> None:
        """Start or find the server. Collective."""
        connection = self.mesh.on_rank_zero(
            lambda: connect(
                self.config, self.settings, engine, self.tokenizer, max_tokens=max_tokens
            ),
            share=False,
        )
        if connection is not None:
            self.notes.append(connection.note)
        self._connection, self._source = connection, engine
        engine.module.register_forward_pre_hook(self._note_forward)

    def _send_weights(self, engine: Engine) -> None:
        """Send the weights of an engine if the server has others, and compare. Collective."""
        moved = torch.tensor([float(self._moved)], device=engine.device)
        if not self.mesh.max(moved).item():
            return
        began = time.perf_counter()
        self._on_server(lambda transfer: transfer.begin())
        size = max(1, int(self.settings.bucket_gb * GB))
        for bucket in exported_weights(engine, self.hooks, size=size):
            self._put(bucket)
        self._on_server(lambda transfer: transfer.finish())
        self.metrics["sync/seconds"] += time.perf_counter() - began
        self._check_canary(engine)
        self._moved = False

    def _put(self, bucket: Mapping[str, Tensor]) -> None:
        self._on_server(lambda transfer: transfer.put(bucket))
        self.metrics["sync/bytes"] += sum(value.nbytes for value in bucket.values())

    def _on_server(self, act: Callable[[Transfer], T], *, share: bool = True) -> T:
        """Return the result of `act` on rank 0, on every rank; without `share` on rank 0 only, and
        None elsewhere. Collective."""

        def acted() -> T:
            assert self._connection is not None, "rank 0 is connected"
            return act(self._connection.transfer)

        return self.mesh.on_rank_zero(acted, share=share)

    def _note_forward(self, module: Any, inputs: Any) -> None:
        """Note that the weights may change after this forward."""
        self._moved |= torch.is_grad_enabled()

    def _check_canary(self, engine: Engine) -> None:
        """Raise RLHFError if the server has other weights than the trainer. Collective."""
        text = self._canary
        number, served = self._on_server(
            lambda transfer: (transfer.number, score(transfer.client, transfer.model, text))
        )
        own = own_logprobs(
            engine, [(text[:1], text[1:])], mesh=self.mesh, budget=self.config.batch.budget
        )[0]
        difference = mean_difference([served], [own])
        limit = self.settings.canary or (EXACT if engine.precision == "fp32" else ROUNDED)
        # A number that is not finite is none that agrees.
        if not difference <= limit:
            raise SameOnAllRanks(
                f"after transfer {number} of the weights the server does not have them: the mean "
                f"log-probability of a text is {_mean(served):.5g} there and {_mean(own):.5g} "
                f"here, which differ by {difference:.3g} per token, more than "
                f"rollouts.vllm.canary {limit:g}; look for the model's family and its dtype "
                "in docs/vllm.md"
            )

    def _check_agreement(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        drawn: Sequence[Sample],
        temperature: float,
    ) -> None:
        """Note how far the server's log-probabilities of a rollout are from the trainer's. Raises
        RLHFError if they are too far. Collective."""
        texts = [(prompt, it.tokens) for prompt, it in zip(prompts, drawn, strict=True)]
        own = own_logprobs(
            engine, texts, mesh=self.mesh, budget=self.config.batch.budget, temperature=temperature
        )
        difference = mean_difference([it.logprobs for it in drawn], own)
        count, limit = sum(len(it.tokens) for it in drawn), self.settings.agreement
        if not difference <= limit:
            raise SameOnAllRanks(
                f"the server's log-probabilities of the {count:,} tokens of the first rollout "
                f"differ from the trainer's by {difference:.3g} on average, more than "
                f"rollouts.vllm.agreement {limit:g}; start it with --logprobs-mode "
                "processed_logprobs and the dtype of the run, or raise the limit"
            )
        self.notes.append(
            f"agreement  log-probabilities of {count:,} tokens under vLLM and the trainer differ "
            f"by {difference:.2g} on average"
        )


def canary_text(prompts: Sequence[Sequence[int]], vocabulary: int, max_tokens: int) -> list[int]:
    """Return the first tokens of the first prompt, and the last token of the vocabulary, which a
    server with another model may not have. The server adds one token."""
    count = min(CANARY_TOKENS, max_tokens - 2)
    return [*map(int, prompts[0][:count]), vocabulary - 1]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _text_config(engine: Engine) -> Any:
    return engine.module.causal.config.get_text_config()
