"""Calls of tools in worker processes, those of an answer in the same one."""

import sys
from collections import deque
from collections.abc import Container, Mapping, Sequence
from contextlib import closing
from typing import Any

import attrs

from rlhf.errors import RLHFError, counted
from rlhf_rollouts.rewards.functions import shown
from rlhf_rollouts.rewards.pool import Pool, Task
from rlhf_rollouts.settings import Tools
from rlhf_rollouts.tools.loading import GET_REWARD, RESET
from rlhf_rollouts.tools.worker import Call, Result, late

EPISODE = (RESET, GET_REWARD)


class Calling:
    """Worker processes that have loaded the tools of a run."""

    def __init__(
        self,
        settings: Tools,
        *,
        workers: int,
        environment: str | None,
        asynchronous: Container[str],
    ) -> None:
        """`environment` is the name of the class, and `asynchronous` are the names of tools and
        methods whose calls may run at the same time."""
        names = ", ".join([*settings.functions, settings.environment or ""]).removesuffix(", ")
        source = (names, "", attrs.asdict(settings))
        self.deadline, self._environment = settings.deadline, environment
        self._asynchronous = asynchronous
        self._pool = Pool([source], workers=workers, kind="tools")
        self._told: set[str] = set()

    def results(self, calls: Sequence[Call]) -> list[Result]:
        """Return the result of each call. Those of asynchronous tools run at the same time on each
        worker, the others one after the other, and so do those of an environment."""
        queues: list[deque[Task]] = [deque() for _ in self._pool.workers]
        together: list[list[Call]] = [[] for _ in queues]
        in_order = {
            call.answer for call in calls
            if call.of_environment and call.name not in self._asynchronous
        }  # fmt: skip
        for call in calls:
            place = call.answer % len(queues)
            ordered = call.of_environment and call.answer in in_order
            if call.name in self._asynchronous and not ordered:
                together[place].append(call)
            else:
                queues[place].append(([call], self.deadline))
        for queue, group in zip(queues, together, strict=True):
            if group:
                # The worker ends each call in time, unless it cannot be interrupted.
                queue.append((group, self.deadline * len(group)))
        found: dict[int, Result] = {}
        with closing(self._pool.outcomes(queues, {})) as outcomes:
            for call, outcome in outcomes:
                result = outcome if isinstance(outcome, Result) else self._without(outcome)
                found[id(call)] = result
                if result.kind == "failed" and not (call.of_environment and call.name in EPISODE):
                    self._tell(call, result)
        return [found[id(call)] for call in calls]

    def reset(self, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Begin an episode for each answer, with the columns of its row. Return the texts that the
        environments begin with. Raises RLHFError if one fails."""
        results = self._of_environments(RESET, [dict(row) for row in rows])
        for result in results:
            self._check(RESET, result)
        return [result.value for result in results]

    def rewards(self, answers: int) -> list[float | None]:
        """Return the reward of each answer that its environment knows; None of one that is lost, or
        does not return in time. Raises RLHFError if one fails."""
        results = self._of_environments(GET_REWARD, [{}] * answers)
        for result in results:
            if result != late(self.deadline):
                self._check(GET_REWARD, result)
        lost = sum(result.kind != "returned" for result in results)
        if lost:
            reason = f"get_reward {late(self.deadline).reason}"
            if any(result.kind == "lost" for result in results):
                reason = "the process of their environments has ended"
            print(
                f"warning: environment {self._environment}: {counted(lost, 'answer')} without a "
                f"reward, since {reason}; they count as unscorable",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return [result.value for result in results]

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _of_environments(self, name: str, arguments: Sequence[dict[str, Any]]) -> list[Result]:
        return self.results(
            [Call(n, name, each, of_environment=True) for n, each in enumerate(arguments)]
        )

    def _without(self, outcome: Any) -> Result:
        """Return the result of a call whose process has been ended, or has ended itself."""
        if outcome.kind == "late":
            return late(self.deadline)
        text = outcome.text.partition(" in a call")[0]
        return Result(kind="failed", text=text, reason=text)

    def _check(self, name: str, result: Result) -> None:
        if result.kind == "failed":
            raise RLHFError(
                f"environment {self._environment}: {name} {result.reason}; correct the class"
            )

    def _tell(self, call: Call, result: Result) -> None:
        """Say once of each tool that it has failed: the policy may call it wrongly at any time."""
        if call.name not in self._told:
            self._told.add(call.name)
            print(
                f"warning: tool {call.name!r}: {result.reason}, called with "
                f"{shown(call.arguments)}; the policy reads this as the result, and later failures "
                "are only counted",
                file=sys.stderr, flush=True,
            )  # fmt: skip
