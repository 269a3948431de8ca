"""What `/metrics` shows of a server, in Prometheus' text format."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TOKENS = tuple(2**power for power in range(6, 18))
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """Counts of one server. `num_open` returns the number of open requests."""

    def __init__(self, num_open: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "rlhf_requests", "Requests that were answered", ["path", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "rlhf_request_seconds", "Time from a request to its answer, of those with status 200",
            ["path"], buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.batch_tokens = Histogram(
            "rlhf_batch_tokens", "Tokens of a forward pass", buckets=TOKENS, registry=self.registry
        )
        Gauge(
            "rlhf_open_requests", "Requests that are accepted and not yet answered",
            registry=self.registry,
        ).set_function(num_open)  # fmt: skip
