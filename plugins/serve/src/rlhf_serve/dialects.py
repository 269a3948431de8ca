"""The three forms of requests and responses, over one scorer: ours, OpenRLHF's and vLLM's.

A dialect reads the body of a request as rows, and returns with them what makes the response out of
their logits: for each row, the logits [N, L] of each of its answers. It raises RLHFError for a body
that it cannot read.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from rlhf.errors import RLHFError
from rlhf.formats import errors_at
from rlhf.scorer import Scorer
from rlhf.trainer import Answer, Row
from rlhf_rows import common_prefix, type_name

Body = Mapping[str, Any]
Response = Callable[[Sequence[Sequence[Tensor]]], dict[str, Any]]
Reading = tuple[list[Row], Response]


def score(body: Body, scorer: Scorer) -> Reading:
    """Read `{"items": [{"prompt", "answers"}]}`. The response has a score for each answer, or the
    list of its scores if it may have several."""
    check_keys(body, "items")
    rows = []
    for number, item in enumerate(as_list("items", body["items"])):
        with errors_at(f"items[{number}]"):
            if not isinstance(item, dict):
                raise RLHFError(f"an item must be an object, not {type_name(item)}")
            check_keys(item, "prompt", "answers")
            rows.append(scorer.encode(item["prompt"], as_list("answers", item["answers"])))

    def response(logits: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
        return {"items": [{"scores": scores_of(answers, scorer)} for answers in logits]}

    return rows, response


def get_reward(body: Body, scorer: Scorer) -> Reading:
    """Read `{"query": [text], "prompts": [text], "labels"}` of OpenRLHF's trainer. A query is a
    whole text with its special tokens. Those of equal `prompts` share what they begin with."""
    check_keys(body, "query", optional=("prompts", "labels"))
    texts = as_texts("query", body["query"])
    prompts = body.get("prompts") or [None] * len(texts)
    if len(as_list("prompts", prompts)) != len(texts):
        raise RLHFError(f"{len(prompts)} prompts for {len(texts)} queries; send one for each")
    ids = whole_texts("query", texts, scorer, special=False)
    groups: dict[Any, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(number if prompt is None else str(prompt), []).append(number)
    rows = [whole([ids[number] for number in group]) for group in groups.values()]

    def response(logits: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
        order = [number for group in groups.values() for number in group]
        scores = [score for answers in logits for score in scores_of(answers, scorer)]
        rewards = [score for _, score in sorted(zip(order, scores, strict=True))]
        return {"rewards": rewards, "scores": rewards, "extra_logs": {}}

    return rows, response


def classify(body: Body, scorer: Scorer) -> Reading:
    """Read `{"input"}` of vLLM, one or several texts or lists of token ids, or `{"messages"}`. The
    response has the logits of each: `use_activation` must not be true."""
    if body.get("use_activation"):
        raise RLHFError("use_activation must be false: a reward has no activation")
    kind = "messages" if "messages" in body else "input"
    check_keys(body, kind, optional=("model", "user", "use_activation", "add_special_tokens"))
    if kind == "messages":
        messages = as_list("messages", body["messages"])
        raise_if_many_ends(scorer)
        rows = [scorer.encode(messages[:-1], [messages[-1:]])]
    else:
        special = bool(body.get("add_special_tokens", True))
        rows = [whole([ids]) for ids in ids_of(body["input"], scorer, special=special)]
    names = scorer.config.id2label
    tokens = sum(len(row.prompt) + len(row.answers[0].tokens) for row in rows)

    def response(logits: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
        data = [
            {
                "index": index, "label": names[int(answer[0].argmax())],
                "probs": answer[0].tolist(), "num_classes": answer.shape[1],
            }
            for index, (answer,) in enumerate(logits)
        ]  # fmt: skip
        return {
            "id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()),
            "model": body.get("model") or str(scorer.folder), "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }  # fmt: skip

    return rows, response


DIALECTS: dict[str, Callable[[Body, Scorer], Reading]] = {
    "/v1/score": score, "/get_reward": get_reward, "/classify": classify,
}  # fmt: skip
"""By the path of the request."""


def scores_of(answers: Sequence[Tensor], scorer: Scorer) -> list[Any]:
    """Return the score of each answer; a list of scores if the scorer's answers have several."""
    scores = [scorer.scores(logits) for logits in answers]
    return [each[0] for each in scores] if scorer.task == "sequence" else scores


def whole(paths: Sequence[list[int]]) -> Row:
    """Return whole texts as one row: what all begin with is the prompt."""
    prompt = common_prefix([path[:-1] for path in paths])
    answers = [Answer(path[len(prompt) :]) for path in paths]
    ends = [[len(answer.tokens) - 1] for answer in answers]
    return Row(prompt, answers, {"ends": ends})


def whole_texts(
    name: str, texts: Sequence[str], scorer: Scorer, *, special: bool
) -> list[list[int]]:
    """Return texts as token ids, each at least one."""
    raise_if_many_ends(scorer)
    ids: list[list[int]] = []
    if texts:
        ids = scorer.tokenizer(list(texts), add_special_tokens=special)["input_ids"]
    for number, path in enumerate(ids):
        if not path:
            raise RLHFError(f"{name}[{number}] has no tokens")
    return ids


def ids_of(value: Any, scorer: Scorer, *, special: bool) -> list[list[int]]:
    """Return one or several texts or lists of token ids as lists of token ids."""
    paths = [value] if is_ids(value) or isinstance(value, str) else value
    if not all(map(is_ids, as_list("input", paths))):
        return whole_texts("input", as_texts("input", paths), scorer, special=special)
    raise_if_many_ends(scorer)
    size = scorer.config.get_text_config().vocab_size
    for token in (token for path in paths for token in path if not 0 <= token < size):
        raise RLHFError(f"token {token} is not one of the model's {size}")
    return paths


def raise_if_without_image(row: Row, scorer: Scorer) -> None:
    """Raise RLHFError for a row without images that has the token which stands for one: the model
    would read the embedding of this token, with which it was never trained."""
    names = ("image_token_id", "image_token_index")
    found = (getattr(scorer.config, name, None) for name in names)
    token = next((number for number in found if number is not None), None)
    tokens = chain(row.prompt, *(answer.tokens for answer in row.answers))
    if token is not None and row.images is None and token in tokens:
        text = scorer.tokenizer.convert_ids_to_tokens(token)
        raise RLHFError(
            f"a text has the token of an image ({text}) without an image; send the conversation as "
            "messages, with the image as a part of type image_url"
        )


def raise_if_many_ends(scorer: Scorer) -> None:
    """Raise RLHFError for a scorer that does not read the end of a text."""
    if scorer.task != "sequence":
        raise RLHFError("this model scores the steps of an answer; send them to /v1/score")


def is_ids(value: Any) -> bool:
    """Return whether a value is a list of token ids, at least one."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def as_texts(name: str, value: Any) -> list[str]:
    """Return one or several texts as a list."""
    texts = as_list(name, [value] if isinstance(value, str) else value)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise RLHFError(f"{name}[{number}] must be text, not {type_name(text)}")
    return texts


def as_list(name: str, value: Any) -> list[Any]:
    """Return `value` if it is a list with something in it."""
    if not isinstance(value, list):
        raise RLHFError(f"{name} must be a list, not {type_name(value)}")
    if not value:
        raise RLHFError(f"{name} is empty")
    return value


def check_keys(body: Body, *required: str, optional: Sequence[str] = ()) -> None:
    """Raise RLHFError for a key that is missing or unknown."""
    for name in required:
        if name not in body:
            raise RLHFError(f"{name} is missing")
    for name in body.keys() - {*required, *optional}:
        known = ", ".join((*required, *optional))
        raise RLHFError(f"unknown key {name!r}; available: {known}")
