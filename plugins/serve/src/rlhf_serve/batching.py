"""The forward passes of a server: what waits while one runs goes into the next one together."""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from rlhf.scorer import Scorer, parts_of
from rlhf.trainer import Row
from rlhf_serve.metrics import Metrics

Waiting = tuple[Row, "asyncio.Future[list[Tensor]]"]


class Batches:
    """Rows of all requests in order of arrival, computed by one thread, up to `max_tokens` at once.

    Everything but the forward pass happens in the event loop, so nothing here needs a lock.
    """

    def __init__(self, scorer: Scorer, *, max_tokens: int, metrics: Metrics) -> None:
        self.scorer = scorer
        self.max_tokens = max_tokens
        self.metrics = metrics
        self._waiting: deque[Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "forward")

    async def logits(self, rows: Sequence[Row]) -> list[list[Tensor]]:
        """Return the logits [N, L] of each answer of each row, once they are computed."""
        futures = []
        for row in rows:
            parts = list(parts_of(row, self.max_tokens))
            own = [asyncio.get_running_loop().create_future() for _ in parts]
            self._waiting.extend(zip(parts, own, strict=True))
            futures.append(own)
        self._arrived.set()
        try:
            return [[logits for part in own for logits in await part] for own in futures]
        finally:
            for future in (future for own in futures for future in own):
                future.cancel()  # Of a request that ended with an error: nothing else waits for it.

    async def run(self) -> None:
        """Compute what arrives, without an end."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                await self._compute(self._next())

    def _next(self) -> list[Waiting]:
        """Remove and return the rows of the next forward pass: at least one."""
        batch: list[Waiting] = []
        left = self.max_tokens
        while self._waiting and (not batch or num_tokens(self._waiting[0][0]) <= left):
            batch.append(self._waiting.popleft())
            left -= num_tokens(batch[-1][0])
        return batch

    async def _compute(self, batch: Sequence[Waiting]) -> None:
        rows = [row for row, future in batch if not future.done()]
        futures = [future for _, future in batch if not future.done()]
        if not rows:
            return
        self.metrics.batch_tokens.observe(sum(map(num_tokens, rows)))
        loop = asyncio.get_running_loop()
        results: Sequence[list[Tensor] | Exception]
        try:
            results = await loop.run_in_executor(self._thread, self.scorer.logits, rows)
        except Exception as error:  # Out of memory, say: the next forward pass may succeed.
            results = [error] * len(rows)
        for future, result in zip(futures, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def num_tokens(row: Row) -> int:
    """Return the tokens of a prompt and all its answers."""
    return len(row.prompt) + sum(len(answer.tokens) for answer in row.answers)
