"""Requests for answers, and what the server returns, which is checked before anything learns from
it."""

import json
import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from attrs import frozen

from rlhf.errors import RLHFError
from rlhf.trainer import Sample
from rlhf_rollout_vllm.client import GENERATE, Client
from rlhf_rollout_vllm.threads import in_parallel
from rlhf_rollout_vllm.transfer import Transfer

LARGEST_SEED = 2**63 - 1
"""Of the server."""
OWN_DISTRIBUTION = {
    "n": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "detokenize": False,
}  # fmt: skip
"""Sampling that changes nothing of what the model predicts, whatever the server's defaults are."""


@frozen(kw_only=True)
class Drawing:
    """How answers are drawn."""

    temperature: float
    ends: Collection[int]
    """Tokens that end an answer."""
    vocabulary: int
    """Number of tokens that the trained model predicts."""


@frozen(kw_only=True)
class Rollout:
    """The answers that are to be drawn."""

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    rooms: Sequence[int]
    """Most tokens of each answer."""
    drawing: Drawing


def draw(transfer: Transfer, rollout: Rollout, *, concurrency: int) -> list[Sample]:
    """Return the server's answers. Each one is a request of its own, with a seed of its own."""

    client, drawing = transfer.client, rollout.drawing
    check_lengths(rollout.prompts, rollout.rooms, transfer.max_tokens)

    def one(prompt: Sequence[int], seed: int, room: int) -> Sample:
        body = request(transfer.model, prompt, seed=seed, room=room, drawing=drawing)
        response = client.post(GENERATE, body)
        return read(response, transfer, room=room, drawing=drawing, where=client.url + GENERATE)

    each = zip(rollout.prompts, rollout.seeds, rollout.rooms, strict=True)
    asked = [partial(one, *one_of) for one_of in each]
    try:
        # After an error, the other answers are of no use.
        return in_parallel(asked, threads=min(concurrency, len(asked)), on_error=client.abort)
    finally:
        client.close()  # Its threads have ended.


def check_lengths(prompts: Sequence[Sequence[int]], rooms: Sequence[int], limit: int) -> None:
    """Raise RLHFError for a prompt that does not fit into the server with its answer."""
    for prompt, room in zip(prompts, rooms, strict=True):
        if len(prompt) + room > limit:
            raise RLHFError(
                f"a prompt of {len(prompt)} tokens and an answer of up to {room} do not fit into "
                f"the server's --max-model-len {limit}; raise it, or lower data.max_tokens to "
                f"{limit - 1}"
            )


def request(
    model: str, prompt: Sequence[int], *, seed: int, room: int, drawing: Drawing
) -> dict[str, Any]:
    """Return the request for one answer."""
    sampling = {
        **OWN_DISTRIBUTION, "seed": int(seed) & LARGEST_SEED, "temperature": drawing.temperature,
        "max_tokens": int(room), "logprobs": 0, "ignore_eos": True,
        "stop_token_ids": [int(end) for end in drawing.ends],
    }  # fmt: skip
    return {"model": model, "token_ids": [int(it) for it in prompt], "sampling_params": sampling}


def read(response: Any, transfer: Transfer, *, room: int, drawing: Drawing, where: str) -> Sample:
    """Return the answer in a response. Raises RLHFError for one that cannot be trained on."""
    try:
        model, (choice,) = response["model"], response["choices"]
        tokens = [int(token) for token in choice["token_ids"]]
        content = choice["logprobs"]["content"]
        logprobs = [float(it["logprob"]) for it in content]
        versions = {span["version"] for span in choice["weight_versions"] or ()}
        is_whole = [it["token_id"] for it in content] == tokens and choice["index"] == 0
    except (LookupError, TypeError, ValueError):
        shown = json.dumps(response)[:200]
        raise RLHFError(
            f"{where} returned a response without one answer, its log-probabilities and its "
            f"weight version: {shown}; use a vLLM of the versions in docs/vllm.md"
        ) from None
    finished = bool(tokens) and tokens[-1] in drawing.ends
    early = len(tokens) < room and not finished
    ended_before = any(token in drawing.ends for token in tokens[:-1])
    strange = [token for token in tokens if not 0 <= token < drawing.vocabulary]
    problem = None
    if model != transfer.model:
        problem = f"an answer of the model {model!r}, not of {transfer.model!r}"
    elif transfer.by_version and versions != {transfer.version}:
        problem = (
            f"an answer of the weights {', '.join(sorted(versions)) or 'without a name'}, not of "
            f"{transfer.version}; does another run use this server?"
        )
    elif strange:
        problem = (
            f"the token {strange[0]}, but the trained model predicts {drawing.vocabulary} tokens; "
            "start the server with the model that is trained"
        )
    elif not is_whole or not all(map(math.isfinite, logprobs)):
        problem = "log-probabilities that do not belong to its tokens"
    elif early or ended_before or len(tokens) > room:
        problem = (
            f"an answer of {len(tokens)} tokens that ended with {choice.get('finish_reason')!r}, "
            f"although it may have {room} and ends only with one of {sorted(drawing.ends)}"
        )
    if problem:
        raise RLHFError(f"{where} returned {problem}")
    return Sample(tokens, logprobs, finished=finished)


def score(client: Client, model: str, text: Sequence[int]) -> list[float]:
    """Return the log-probability of each token of a text but the first, at temperature 1."""
    sampling = {**OWN_DISTRIBUTION, "temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}
    body = {"model": model, "token_ids": [*text], "sampling_params": sampling}
    try:
        response = client.post(GENERATE, body)
    except RLHFError as error:
        if "out of vocabulary" not in str(error):
            raise
        raise RLHFError(
            f"{client.url} serves a model without the token {text[-1]}, the last one that the "
            "trained model has; start the server with the model that is trained"
        ) from None
    try:
        found = response["prompt_logprobs"][1:]
        pairs = zip(found, text[1:], strict=True)
        return [float(each[str(token)]["logprob"]) for each, token in pairs]
    except (LookupError, TypeError, ValueError):
        shown = json.dumps(response)[:200]
        raise RLHFError(
            f"{client.url}{GENERATE} returned a response without the log-probabilities of the "
            f"prompt: {shown}; use a vLLM of the versions in docs/vllm.md"
        ) from None
