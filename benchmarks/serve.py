"""A server of a reward model under load: throughput, delays, and what happens at overload.

    python benchmarks/serve.py runs/rm-1 demo:ranked

Clients are threads with a connection each (`http.client`), which send the rows of the data one
after the other. Every request must be answered once, with the rewards that the folder's scorer
computes for each answer alone. The last line has more clients than the server lets in: a refused
client waits a moment and sends the request again.
"""

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attrs import define, field, frozen

from rlhf.folder.run_folder import model_folder
from rlhf.scorer import open_scorer
from rlhf_serve.check import ALLOWED, flat, read_items, score

TOKEN = "load"
PAUSE = 0.25
"""Seconds that a refused client waits; the server's own advice is 1."""


@frozen
class Question:
    """A request and the rewards that it must get."""

    body: bytes
    rewards: list[float]


@define
class Load:
    """What the clients of one load have seen."""

    clients: int
    seconds: float = 0.0
    delays: list[float] = field(factory=list)
    """Seconds of each answered request, without those that were refused before."""
    statuses: Counter[int] = field(factory=Counter)
    answers: int = 0
    largest: float = 0.0
    """Largest difference of a reward, of those above 1 as a share."""

    def line(self) -> str:
        """Return a row of the table."""
        delays = sorted(self.delays)
        cut = statistics.quantiles(delays, n=100)
        return (
            f"| {self.clients} | {len(delays) / self.seconds:.0f} | "
            f"{self.answers / self.seconds:.0f} | {1000 * cut[49]:.1f} | {1000 * cut[98]:.1f} | "
            f"{self.statuses[200]} | {self.statuses[503]} | {self.largest:.1e} |"
        )


def main() -> int:
    """Print the table; return 1 if a request was lost or got other rewards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="run folder, or its model/")
    parser.add_argument("data", help="rows of preferences")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=2000, help="requests of each load")
    parser.add_argument("--rows", type=int, default=256, help="different rows that are sent")
    parser.add_argument("--queue", type=int, default=16, help="queue of the last load")
    arguments = parser.parse_args()
    questions, allowed = questions_of(arguments.model, arguments.data, arguments.rows)
    print("| clients | requests/s | answers/s | p50, ms | p99, ms | 200 | 503 | difference |")
    print("|---|---|---|---|---|---|---|---|")
    loads = []
    with serving(arguments.model) as url:
        for clients in arguments.clients:
            loads.append(under_load(url, clients, questions, arguments.requests))
    with serving(arguments.model, "--queue", str(arguments.queue)) as url:
        clients = max(arguments.clients)
        loads.append(under_load(url, clients, questions, arguments.requests))
    lost = [load for load in loads if load.statuses[200] != arguments.requests]
    wrong = [load for load in loads if not load.largest <= allowed]
    others = {status for load in loads for status in load.statuses} - {200, 503}
    print(f"lost {len(lost)}, wrong {len(wrong)}, other answers {sorted(others) or 'none'}")
    return int(bool(lost or wrong or others))


def questions_of(model: str, data: str, number: int) -> tuple[list[Question], float]:
    """Return requests with the folder's own rewards, and how far a server's may be from them."""
    scorer = open_scorer(model_folder(Path(model)), device="cpu", dtype="auto")
    questions = []
    for _, prompt, answers in islice(read_items(data, scorer), number):
        ((body, _),) = score(prompt, answers, scorer)
        logits = scorer.read(prompt, answers, max_tokens=1)
        rewards = flat([scorer.scores(each) for each in logits])
        questions.append(Question(json.dumps(body).encode(), rewards))
    return questions, ALLOWED[scorer.precision]


@contextmanager
def serving(model: str, *words: str) -> Iterator[str]:
    """Serve the model on a free port; yields the address."""
    command = [sys.executable, "-m", "rlhf", "serve", model, "--port", "0", "--token", TOKEN]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdout is not None
        address = None
        while address is None:
            line = server.stdout.readline()
            assert line, f"the server ended with exit code {server.wait()}"
            address = re.search(r"^serving +(http://\S+)$", line)
        try:
            yield address[1]
        finally:
            server.terminate()


def under_load(url: str, clients: int, questions: list[Question], requests: int) -> Load:
    """Send so many requests from so many clients at once, and check the server's own counts."""
    before = answered(url)
    load, own = Load(clients), [range(first, requests, clients) for first in range(clients)]
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        parts = list(pool.map(lambda numbers: client(url, numbers, questions), own))
    load.seconds = time.perf_counter() - start
    for part in parts:
        load.delays += part.delays
        load.statuses += part.statuses
        load.answers += part.answers
        load.largest = max(load.largest, part.largest)
    counted = answered(url) - before
    assert counted == load.statuses[200], f"the server has answered {counted:g} requests"
    print(load.line(), flush=True)
    return load


def client(url: str, numbers: range, questions: list[Question]) -> Load:
    """Send the requests with these numbers over one connection, each until it is not refused."""
    seen = Load(1)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    for number in numbers:
        question = questions[number % len(questions)]
        while True:
            start = time.perf_counter()
            status, body = post(connection, question.body)
            seen.statuses[status] += 1
            if status != 503:
                break
            time.sleep(PAUSE)
        if status == 200:
            seen.delays.append(time.perf_counter() - start)
            rewards = body["items"][0]["scores"]
            seen.answers += len(rewards)
            pairs = zip(rewards, question.rewards, strict=True)
            differences = [abs(one - own) / max(1.0, abs(own)) for one, own in pairs]
            seen.largest = max(seen.largest, *differences)
    connection.close()
    return seen


def post(connection: http.client.HTTPConnection, body: bytes) -> tuple[int, Any]:
    """Send a request and return status and JSON of its answer."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/score", body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def answered(url: str) -> float:
    """Return how many requests the server has answered with scores, by its own count."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    found = [line for line in lines if "requests_total{" in line and '"200"' in line]
    return sum(float(line.split()[-1]) for line in found)


if __name__ == "__main__":
    sys.exit(main())
