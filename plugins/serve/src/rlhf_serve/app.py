"""The HTTP side of a server: routes, the token, what is refused, and its lifespan."""

import asyncio
import base64
import binascii
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhf.errors import RLHFError, first_line
from rlhf.formats import BadImage
from rlhf.scorer import Scorer, parse_object
from rlhf_serve.batching import Batches
from rlhf_serve.dialects import DIALECTS, Reading, raise_if_without_image
from rlhf_serve.metrics import Metrics

MAX_BYTES = 2**26
"""Size of a request's body, which is refused above it."""
BODY_SECONDS = 60
"""Time in which a request's body has to arrive."""
RETRY_SECONDS = 1
"""Seconds after which a refused client may try again."""
OF_RUNS = ", or set data.bad_images to drop"
"""What rows of a run may do about a bad image."""
log = logging.getLogger("uvicorn.error")


class Service:
    """A scorer behind routes. `token` None lets everybody in; `queue` bounds the open requests."""

    def __init__(
        self, scorer: Scorer, *, token: str | None, max_tokens: int, longest: int, queue: int
    ) -> None:
        self.scorer = scorer
        self.token = token
        self.longest = longest
        """Tokens of the longest prompt with an answer."""
        self.queue = queue
        self.open = 0
        """Requests that are accepted and not yet answered."""
        self.metrics = Metrics(lambda: self.open)
        self.batches = Batches(scorer, max_tokens=max_tokens, metrics=self.metrics)
        # One thread: a chat template keeps what it rendered last.
        self.reader = ThreadPoolExecutor(1, "reader")

    def app(self) -> Starlette:
        """Return the application."""
        routes = [Route(path, self.score, methods=["POST"]) for path in DIALECTS]
        routes += [Route("/health", self.health), Route("/metrics", self.show_metrics)]
        return Starlette(routes=routes, lifespan=self.lifespan)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Compute forward passes until the last open request is answered."""
        running = asyncio.create_task(self.batches.run())
        yield
        running.cancel()

    async def health(self, request: Request) -> Response:
        """Answer without a token: a load balancer has none."""
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        try:
            self.check_token(request)
        except HTTPException as refused:
            return answer(refused.status_code, refused.detail)
        metrics = generate_latest(self.metrics.registry)
        return Response(metrics, media_type="text/plain; version=0.0.4")

    async def score(self, request: Request) -> Response:
        """Answer a request in the dialect of its path."""
        path, start = request.url.path, time.perf_counter()
        response: Response
        try:
            self.check_token(request)
            response = JSONResponse(await self.result(path, request))
            self.metrics.seconds.labels(path).observe(time.perf_counter() - start)
        except HTTPException as refused:
            response = answer(refused.status_code, refused.detail)
        except RLHFError as error:
            # The error names the place in the body, and has that of the image as its cause.
            is_image = isinstance(error, BadImage) or isinstance(error.__cause__, BadImage)
            response = answer(400 if is_image else 422, str(error).removesuffix(OF_RUNS))
        except ClientDisconnect:
            response = answer(499, "the client has closed the connection")
        except Exception as error:  # A forward pass may fail in any way; the next one may succeed.
            log.exception("%s failed", path)
            response = answer(500, f"{type(error).__name__}: {first_line(error)}")
        self.metrics.requests.labels(path, str(response.status_code)).inc()
        return response

    async def result(self, path: str, request: Request) -> dict[str, object]:
        """Return the response's body."""
        if self.open >= self.queue:
            raise HTTPException(503, f"{self.open} requests are waiting; try again later")
        self.open += 1
        try:
            body = await read_body(request)
            loop = asyncio.get_running_loop()
            rows, response = await loop.run_in_executor(self.reader, self.read, path, body)
            return response(await self.batches.logits(rows))
        finally:
            self.open -= 1

    def read(self, path: str, body: bytes) -> Reading:
        """Read and tokenise a body. Raises RLHFError for one that cannot be scored."""
        try:
            text = body.decode()
        except UnicodeDecodeError:
            raise RLHFError("the body is not UTF-8") from None
        rows, response = DIALECTS[path](parse_object(text, "the body"), self.scorer)
        for row in rows:
            raise_if_without_image(row, self.scorer)
            length = len(row.prompt) + max(len(answer.tokens) for answer in row.answers)
            if length > self.longest:
                raise RLHFError(
                    f"a prompt with its answer has {length:,} tokens; this server takes at most "
                    f"{self.longest:,}"
                )
        return rows, response

    def check_token(self, request: Request) -> None:
        """Raise HTTPException without the token, which may also be the password of the URL."""
        if self.token is None:
            return
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "basic":
            with contextlib.suppress(binascii.Error):
                value = base64.b64decode(value).decode(errors="replace").partition(":")[2]
        if not secrets.compare_digest(value.encode(), self.token.encode()):
            raise HTTPException(
                401, "send the header `Authorization: Bearer TOKEN` with this server's token"
            )


async def read_body(request: Request) -> bytes:
    """Return the body. Raises HTTPException if it is too large or does not arrive in time."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > MAX_BYTES:
                    raise HTTPException(413, f"the body has more than {MAX_BYTES >> 20} MiB")
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive in {BODY_SECONDS} s") from None
    return b"".join(parts)


def answer(status: int, reason: str) -> Response:
    """Return the response to a refused request."""
    headers = {503: {"Retry-After": str(RETRY_SECONDS)}, 401: {"WWW-Authenticate": "Bearer"}}
    return JSONResponse({"error": reason}, status, headers.get(status))
