"""The engine `vllm`: rank 0 speaks to the server, and all ranks get the answers."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf.engine import Engine, Mesh
from rlhf.errors import SameOnAllRanks, counted
from rlhf.hookspecs import BackendHooks
from rlhf.plugin import Config
from rlhf.rollouts import exported_weights
from rlhf.trainer import Sample
from rlhf_rollout_vllm.agreement import check_agreement, own_logprobs
from rlhf_rollout_vllm.answers import Drawing, Rollout, draw, score
from rlhf_rollout_vllm.canary import EXACT, ROUNDED, canary_texts, check_canary
from rlhf_rollout_vllm.client import ServerEnded
from rlhf_rollout_vllm.config import VLLMConfig
from rlhf_rollout_vllm.connection import Connection, connect
from rlhf_rollout_vllm.threads import in_background
from rlhf_rollout_vllm.transfer import GB, Transfer

T = TypeVar("T")
Writing = Future[list[Sample]] | None
"""The answers that the server writes, on rank 0 only."""


class VLLM:
    """A vLLM server writes the answers of one engine's model. Weights are sent to it when a forward
    with gradient has been run since they were sent last, or when it was started again."""

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
        self._max_tokens = 0
        self._moved = True
        """Whether the weights of that engine may have changed since they were sent."""
        self._canary: list[list[int]] = []
        self._agreed = False
        self._ended: str | None = None
        """Why the server has ended, until it is started again."""
        self._restarts = 0

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
        """See `rlhf.rollouts.RolloutEngine`. The first answers of a server are there already: they
        are compared with weights that the first step changes."""
        vocabulary = engine.module.tokens or _text_config(engine).vocab_size
        if self._source is None:
            self._max_tokens = max_tokens
            self._canary = canary_texts(prompts, vocabulary, max_tokens)
            self._open(engine)
        elif self._source is not engine:
            raise SameOnAllRanks(
                "rollouts.engine vllm serves one model, but this trainer samples from several; use "
                "embedded"
            )
        rooms = [max(1, min(max_new_tokens, max_tokens - len(prompt))) for prompt in prompts]
        drawing = Drawing(temperature=temperature, ends=frozenset(ends), vocabulary=vocabulary)
        rollout = Rollout(prompts=prompts, seeds=seeds, rooms=rooms, drawing=drawing)
        writing = self._write(engine, rollout)
        if self._agreed:
            return lambda: self._wait(engine, rollout, writing)
        drawn = self._wait(engine, rollout, writing)
        return lambda: drawn

    def _write(self, engine: Engine, rollout: Rollout) -> Writing:
        """Have the server write answers with the weights of now. Collective."""
        while True:
            try:
                if self._ended is not None:
                    self._start_again(engine)
                self._send_weights(engine)
                break
            except ServerEnded as ended:
                self._note_end(ended)
        concurrency = self.settings.concurrency

        def begun(transfer: Transfer) -> Writing:
            return in_background(partial(draw, transfer, rollout, concurrency=concurrency))

        return self._on_server(begun, share=False)

    def _wait(self, engine: Engine, rollout: Rollout, writing: Writing) -> list[Sample]:
        """Return the answers that are being written; those of a server that has ended are drawn
        again by another. Collective."""
        while True:
            try:
                drawn = self._on_server(partial(_result, writing))
                break
            except ServerEnded as ended:
                if self._has_moved(engine):
                    raise SameOnAllRanks(
                        f"{ended}; the weights of its answers have been trained since "
                        "(rollouts.lag), so continue from the last checkpoint with --resume"
                    ) from None
                self._note_end(ended)
                writing = self._write(engine, rollout)
        if not self._agreed:
            self._check_agreement(engine, rollout, drawn)
            self._agreed = True
        return drawn

    def _open(self, engine: Engine) -> None:
        """Start or find the server. Collective."""
        connection = self.mesh.on_rank_zero(lambda: self._connect(engine), share=False)
        if connection is not None:
            self.notes.append(connection.note)
        self._connection, self._source = connection, engine
        engine.module.register_forward_pre_hook(self._note_forward)

    def _connect(self, engine: Engine, **how: Any) -> Connection:
        return connect(
            self.config, self.settings, engine, self.tokenizer, max_tokens=self._max_tokens, **how
        )

    def _note_end(self, ended: ServerEnded) -> None:
        """Note that the server has ended. Raises RLHFError if it may not be started again."""
        if self._restarts >= self.settings.restarts:
            again = counted(self._restarts, "time")
            more = f"; it was started again {again}, as rollouts.vllm.restarts allows"
            raise SameOnAllRanks(f"{ended}{more if self._restarts else ''}") from None
        self._restarts += 1
        # Another server has no weights, and its log-probabilities may be others.
        self._ended, self._moved, self._agreed = str(ended), True, False

    def _start_again(self, engine: Engine) -> None:
        """Start the server again. Collective."""

        def again() -> Connection:
            old = self._connection
            assert old is not None, "rank 0 is connected"
            assert old.server is not None, "the run has started the server"
            old.close()
            return self._connect(engine, log=old.server.log)

        try:
            self._connection = self._on_rank_zero(again, share=False)
        except SameOnAllRanks as error:
            raise SameOnAllRanks(f"{self._ended}; when it was started again, {error}") from None
        if self._connection is not None:
            number = f"restart {self._restarts} of {self.settings.restarts}"
            self.notes.append(f"rollouts   {self._ended}; {number}")
            self.notes.append(self._connection.note)
        self._ended = None

    def _has_moved(self, engine: Engine) -> bool:
        """Return whether the server may have other weights than the engine. Collective."""
        moved = torch.tensor([float(self._moved)], device=engine.device)
        return bool(self.mesh.max(moved).item())

    def _send_weights(self, engine: Engine) -> None:
        """Send the weights of an engine if the server has others, and compare. Collective."""
        if not self._has_moved(engine):
            return
        began = time.perf_counter()
        self._on_server(lambda transfer: transfer.begin())
        size = max(1, int(self.settings.bucket_gb * GB))
        ended: ServerEnded | None = None
        for bucket in exported_weights(engine, self.hooks, size=size):
            if ended is not None:
                continue  # Every rank takes all buckets.
            try:
                self._on_server(partial(_put, bucket=bucket))
                self.metrics["sync/bytes"] += sum(value.nbytes for value in bucket.values())
            except ServerEnded as error:
                ended = error
        if ended is not None:
            raise ended
        self._on_server(lambda transfer: transfer.finish())
        self.metrics["sync/seconds"] += time.perf_counter() - began
        self._check_canary(engine)
        self._moved = False

    def _on_server(self, act: Callable[[Transfer], T], *, share: bool = True) -> T:
        """Return the result of `act` on rank 0, as `_on_rank_zero` does. Collective."""

        def acted() -> T:
            assert self._connection is not None, "rank 0 is connected"
            return act(self._connection.transfer)

        return self._on_rank_zero(acted, share=share)

    def _on_rank_zero(self, act: Callable[[], T], *, share: bool) -> T:
        """Return the result of `act` on rank 0, on every rank; without `share` on rank 0 only, and
        None elsewhere. ServerEnded is raised on every rank as such. Collective."""
        own: Any = None

        def caught() -> tuple[T | None, str | None]:
            nonlocal own
            try:
                own = act()
            except ServerEnded as ended:
                return None, str(ended)
            return (own if share else None), None

        shared, ended = self.mesh.on_rank_zero(caught)
        if ended is not None:
            raise ServerEnded(ended)
        return shared if share else own  # type: ignore[return-value]

    def _note_forward(self, module: Any, inputs: Any) -> None:
        """Note that the weights may change after this forward."""
        self._moved |= torch.is_grad_enabled()

    def _check_canary(self, engine: Engine) -> None:
        """Raise RLHFError if the server has other weights than the trainer. Collective."""

        def scored(transfer: Transfer) -> tuple[int, list[list[float]]]:
            client, model = transfer.client, transfer.model
            return transfer.number, [score(client, model, text) for text in self._canary]

        number, served = self._on_server(scored)
        texts = [(text[:1], text[1:]) for text in self._canary]
        own = own_logprobs(engine, texts, mesh=self.mesh, budget=self.config.batch.budget)
        limit = self.settings.canary or (EXACT if engine.precision == "fp32" else ROUNDED)
        check_canary(served, own, limit=limit, number=number)

    def _check_agreement(self, engine: Engine, rollout: Rollout, drawn: Sequence[Sample]) -> None:
        """Raise RLHFError if the server's log-probabilities of a rollout are far from those of the
        trainer. Collective."""
        texts = [(prompt, it.tokens) for prompt, it in zip(rollout.prompts, drawn, strict=True)]
        own = own_logprobs(
            engine, texts, mesh=self.mesh, budget=self.config.batch.budget,
            temperature=rollout.drawing.temperature,
        )  # fmt: skip
        served = [it.logprobs for it in drawn]
        self.notes.append(check_agreement(served, own, limit=self.settings.agreement))


def _put(transfer: Transfer, *, bucket: Mapping[str, Tensor]) -> None:
    transfer.put(bucket)


def _result(writing: Writing, transfer: Transfer) -> list[Sample]:
    assert writing is not None, "rank 0 has asked for the answers"
    return writing.result()


def _text_config(engine: Engine) -> Any:
    return engine.module.causal.config.get_text_config()
