"""A server that scores: its requests, its failures, and how often it is asked."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlhf.errors import RLHFError
from rlhf_rollouts.rewards import Rewards, RewardSpec
from rlhf_rollouts.rewards import server as module
from rlhf_rollouts.rewards.server import post, server


class Fake(ThreadingHTTPServer):
    """Answers with what `answers` has, one after the other; the last one stays."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, Any]] = []
        self.requests: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        fake = self.server
        assert isinstance(fake, Fake)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.requests.append((self.path, self.headers["Authorization"], body))
        status, answer = fake.answers.pop(0) if len(fake.answers) > 1 else fake.answers[0]
        text = answer if isinstance(answer, str) else json.dumps(answer)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as fake:
        threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield fake
        fake.shutdown()


def test_a_server_scores_the_answers_of_each_prompt_together(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_TOKEN", "secret")
    fake.answers = [(200, {"items": [{"scores": [1.5, 2]}, {"scores": [-1]}]})]
    rewards = Rewards([RewardSpec(url=fake.url, weight=2.0)])
    rewards.check()
    result = rewards(
        prompts=["a", "a", "b"], completions=["x", "y", "z"], completion_ids=[[1]] * 3,
        columns={"answer": ["1"] * 3}, trainer_state={},
    )  # fmt: skip
    rewards.close()
    items = [{"prompt": "a", "answers": ["x", "y"]}, {"prompt": "b", "answers": ["z"]}]
    assert fake.requests == [("/v1/score", "Bearer secret", {"items": items})]
    assert result.by_name["server"].tolist() == [1.5, 2, -1]
    assert result.total.tolist() == [3, 4, -2]


def test_a_server_that_fails_for_a_while_is_asked_again(fake: Fake) -> None:
    fake.answers = [(503, {"error": "busy"}), (500, "oops"), (200, {"items": []})]
    assert post(fake.url, {}, seconds=5.0, pauses=[0.01, 0.01, 0.01]) == {"items": []}
    assert len(fake.requests) == 3
    assert module.PAUSES == (1, 4, 16)


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (422, {"error": "too long"}, 'answered 422: {"error": "too long"}; look at the output of '
         "the server"),
        (401, "no", "answered 401: no; set its token in RLHF_TOKEN"),
        (200, "no", "returned a response that is not JSON; check the address"),
        (200, {"scores": [1]}, 'returned a response without items and scores: {"scores": [1]}; '
         "check the address"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_at_once(fake: Fake, status: int, answer: Any, message: str) -> None:
    fake.answers = [(status, answer)]
    with pytest.raises(RLHFError) as raised:
        server(["a"], ["x"], url=fake.url, seconds=60.0)
    assert str(raised.value) == f"{fake.url} {message}"
    assert len(fake.requests) == 1


def test_a_server_that_is_down_is_one_line(fake: Fake) -> None:
    fake.answers = [(503, "busy")]
    with pytest.raises(RLHFError) as raised:
        post(fake.url, {}, seconds=60.0, pauses=[0.01])
    assert str(raised.value) == f"{fake.url} answered 503: busy; look at the output of the server"
    # A pause that would end after the deadline is not waited for.
    message = (
        "http://127.0.0.1:1/v1/score does not answer ([Errno 111] Connection refused); start the "
        "server, or correct the address"
    )
    with pytest.raises(RLHFError) as raised:
        server(["a"], ["x"], url="http://127.0.0.1:1/v1/score", seconds=0.5)
    assert str(raised.value) == message
    rewards = Rewards([RewardSpec(url="http://127.0.0.1:1")])
    with pytest.raises(RLHFError) as raised:
        rewards.check()
    rewards.close()
    assert str(raised.value) == f"reward 'server': {message}"
