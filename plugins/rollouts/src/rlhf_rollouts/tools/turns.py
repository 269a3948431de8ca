"""Answers of several turns: the policy writes, the run makes its calls, and it continues from the
same token ids with those of the results behind them.

The results are tokens of the answer that nothing predicts. Their log-probabilities are nan.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from attrs import define, field, frozen

from rlhf.engine import Engine
from rlhf.errors import RLHFError, SameOnAllRanks, counted
from rlhf.trainer import Example, Run, Sample, answer_seeds
from rlhf_rollouts.settings import Tools
from rlhf_rollouts.tools.calling import Calling
from rlhf_rollouts.tools.offer import Offer
from rlhf_rollouts.tools.prompts import PROMPT, TOOLS, continued, with_tools
from rlhf_rollouts.tools.template import Message, ToolTemplate, Turn
from rlhf_rollouts.tools.worker import Call, Result
from rlhf_rollouts.written import sampled, stopped, turn_seed

KEYWORDS = "chat_template_kwargs"


@frozen(kw_only=True)
class Conversations:
    """The answers of a rollout, which may have several turns."""

    examples: Sequence[Example]
    """The rows, with prompts that end with the text of `reset`."""
    groups: Sequence[Sequence[Sample]]
    """The answers to each."""
    completions: Sequence[Sequence[Sequence[Message]]] | None = None
    """The same as messages: of the assistant, and of tools; None if each has one turn."""
    rewards: Callable[[], Sequence[float | None]] | None = None
    """Returns what the environments say of the answers, before the next ones are written; None if
    they do not. Collective."""
    sums: Mapping[str, tuple[float, float]] = field(factory=dict)
    """Metrics, each as a sum and what it is divided by."""


@frozen(kw_only=True)
class Step:
    """What follows a turn of the policy."""

    message: Message
    results: Sequence[Message] = ()
    suffix: Sequence[int] | None = None
    """Token ids between the turn and the next one; None if the answer ends with it."""
    finished: bool = False
    """Whether the answer has ended itself; if not, it was cut."""
    malformed: bool = False


@define(kw_only=True, eq=False)
class Dialogue:
    """An answer while it is being written."""

    number: int
    prompt: Sequence[int]
    keywords: Mapping[str, Any]
    """Arguments of the chat template."""
    seed: int
    room: int
    """The most tokens that it may have, with those of results."""
    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    messages: list[Message] = field(factory=list)
    turns: int = 0
    start: int = 0
    """Where the newest turn begins."""
    ended: bool = False
    """Whether the newest turn has ended itself."""
    finished: bool = False

    @property
    def before(self) -> list[int]:
        """All token ids before the newest turn."""
        return [*self.prompt, *self.tokens[: self.start]]

    @property
    def path(self) -> list[int]:
        """All token ids, which the next turn continues."""
        return [*self.prompt, *self.tokens]

    @property
    def sample(self) -> Sample:
        """The answer as it is now."""
        return Sample(self.tokens, self.logprobs, self.finished)

    def hear(self, sample: Sample) -> None:
        """Add a turn of the policy, at most as much as there is room for."""
        room = self.room - len(self.tokens)
        self.start, self.turns = len(self.tokens), self.turns + 1
        self.ended = sample.finished and len(sample.tokens) <= room
        self.tokens += sample.tokens[:room]
        self.logprobs += sample.logprobs[:room]

    def follow(self, step: Step) -> bool:
        """Add what follows the turn. Return whether there is a next one."""
        self.messages += [step.message, *step.results]
        self.finished = step.finished
        if step.suffix is None:
            return False
        self.tokens += step.suffix
        self.logprobs += [math.nan] * len(step.suffix)
        return True


class Turns:
    """Writes answers in which tools are called. Collective to create and to call."""

    def __init__(
        self, run: Run, settings: Tools, offered: Offer, *, workers: int, section: str
    ) -> None:
        """Start the processes in which tools run. Raises RLHFError for a tool that cannot be
        loaded, or a chat template without tools; `section` is that of the trainer."""
        self._run, self._settings, self._offer = run, settings, offered
        self._section = section
        self._calling: Any = None
        """The processes, on rank 0."""
        run.on_rank_zero(lambda: self._start(workers), share=False)

    def __call__(
        self,
        engine: Engine,
        examples: Sequence[Example],
        seeds: Sequence[int],
        *,
        answers: int,
        max_new_tokens: int,
        temperature: float,
        stop: str | None,
    ) -> Conversations:
        """Return `answers` answers to each example; the arguments are those of `written`."""
        begun = self._begin(examples, answers, max_new_tokens)
        repeated = [each for each in begun for _ in range(answers)]
        dialogues = [
            Dialogue(
                number=number, prompt=example.prompt, seed=seed, room=room,
                keywords=example.columns.get(KEYWORDS) or {},
            )
            for number, (seed, (example, room)) in enumerate(
                zip(answer_seeds(seeds, answers), repeated, strict=True)
            )
        ]  # fmt: skip
        sums = self._write(
            engine, dialogues, temperature, None if stop is None else re.compile(stop)
        )
        groups = [dialogues[start : start + answers] for start in range(0, len(dialogues), answers)]
        return Conversations(
            examples=[example for example, _ in begun],
            groups=[[each.sample for each in group] for group in groups],
            completions=[[each.messages for each in group] for group in groups],
            rewards=partial(self._rewards, len(dialogues)) if self._offer.rewards else None,
            sums=sums,
        )

    def _rewards(self, answers: int) -> Sequence[float | None]:
        return self._run.on_rank_zero(lambda: self._calling.rewards(answers))

    def _write(
        self,
        engine: Engine,
        dialogues: Sequence[Dialogue],
        temperature: float,
        stop: re.Pattern[str] | None,
    ) -> dict[str, tuple[float, float]]:
        """Write the answers, all of them a turn at a time, and return metrics. Collective."""
        most, calls, failures, malformed = self._longest(engine), 0, 0, 0
        waiting = dialogues
        while waiting:
            drawn = sampled(
                self._run, engine, prompts=[each.path for each in waiting],
                seeds=[turn_seed(each.seed, each.turns) for each in waiting],
                max_new_tokens=max(each.room - len(each.tokens) for each in waiting),
                temperature=temperature,
            )  # fmt: skip
            for each, sample in zip(waiting, drawn, strict=True):
                each.hear(stopped(sample, stop, self._run.tokenizer) if stop else sample)
            steps, made, failed = self._run.on_rank_zero(partial(self._answered, waiting, most))
            calls, failures = calls + made, failures + failed
            malformed += sum(step.malformed for step in steps)
            pairs = zip(waiting, steps, strict=True)
            waiting = [each for each, step in pairs if each.follow(step)]
        answers = float(len(dialogues))
        return {
            "tools/call_frequency": (float(calls), answers),
            "tools/failure_frequency": (float(failures), float(calls)),
            "tools/malformed_frequency": (float(malformed), answers),
        }

    def close(self) -> None:
        """End the processes."""
        if self._calling is not None:
            self._calling.close()

    def _start(self, workers: int) -> None:
        try:
            self._template = ToolTemplate(self._run.tokenizer, self._offer.schemas)
        except RLHFError as error:
            raise RLHFError(f"{self._section}.tools: {error}") from error
        self._calling = Calling(
            self._settings, workers=workers, environment=self._offer.environment,
            asynchronous=self._offer.asynchronous,
        )  # fmt: skip
        names = ", ".join(schema["function"]["name"] for schema in self._offer.schemas)
        of = f"; environment {self._offer.environment}" if self._offer.environment else ""
        self._run.notes.append(f"tools      {names}{of}")

    def _longest(self, engine: Engine) -> int:
        """Return the most tokens that prompt and answer may have together."""
        text = engine.module.causal.config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None) or math.inf
        return int(min(self._run.config.data.max_tokens, positions))

    def _begin(
        self, examples: Sequence[Example], answers: int, room: int
    ) -> list[tuple[Example, int]]:
        """Return the examples with prompts that end with the text of `reset`, and the room of their
        answers."""
        if self._offer.environment is None:
            return [(example, room) for example in examples]
        rows = [
            {name: value for name, value in example.columns.items() if name != TOOLS}
            for example in examples
        ]
        started = [row for row in rows for _ in range(answers)]
        texts = self._run.on_rank_zero(lambda: self._calling.reset(started))
        begun = []
        for place, (example, row) in enumerate(zip(examples, rows, strict=True)):
            text, *others = texts[place * answers : (place + 1) * answers]
            if any(other != text for other in others):
                raise SameOnAllRanks(
                    f"environment {self._offer.environment}: reset returned different texts for "
                    f"answers to {example.row}; return one that depends only on the row"
                )
            if text is None:
                begun.append((example, room))
            else:
                begun.append(self._continued(example, row, text, room))
        return begun

    def _continued(
        self, example: Example, row: Mapping[str, Any], text: str, room: int
    ) -> tuple[Example, int]:
        """Return an example whose prompt ends with a text, which counts as part of the answers, so
        that no path is longer than it may be."""
        messages = continued(row[PROMPT], text)
        row = {**row, PROMPT: messages}
        try:
            prompt = with_tools(row, self._offer.schemas, self._run.tokenizer).prompt
        except RLHFError as error:
            raise SameOnAllRanks(
                f"environment {self._offer.environment}: {example.row} with the text of reset: "
                f"{error}"
            ) from error
        left = room - (len(prompt) - len(example.prompt))
        most = self._run.config.data.max_tokens
        if left < 1 or len(prompt) >= most:
            raise SameOnAllRanks(
                f"environment {self._offer.environment}: the prompt of {example.row} has "
                f"{counted(len(prompt), 'token')} with the text of reset, which leaves no room for "
                f"an answer; raise {self._section}.max_new_tokens or data.max_tokens"
            )
        columns = {**example.columns, PROMPT: messages}
        return attrs.evolve(example, prompt=prompt, columns=columns), left

    def _answered(self, dialogues: Sequence[Dialogue], most: int) -> tuple[list[Step], int, int]:
        """Return what follows the newest turn of each, and how many calls were made and failed."""
        turns = [self._template.read(it.before, it.tokens[it.start :]) for it in dialogues]
        limit = self._settings.max_iterations
        asked = [
            turn.calls if it.ended and (limit is None or it.turns <= limit) else []
            for it, turn in zip(dialogues, turns, strict=True)
        ]
        results = iter(self._results(dialogues, asked))
        answered = [[next(results) for _ in calls] for calls in asked]
        flat = [result for group in answered for result in group]
        failed = sum(result.kind == "failed" for result in flat)
        return [
            self._step(*each, most) for each in zip(dialogues, turns, asked, answered, strict=True)
        ], len(flat), failed  # fmt: skip

    def _results(
        self, dialogues: Sequence[Dialogue], asked: Sequence[Sequence[Message]]
    ) -> list[Result]:
        """Return the results of all calls; one that does not call a tool fails without
        being made."""
        names = {schema["function"]["name"] for schema in self._offer.schemas}
        found: list[Result | None] = []
        calls: list[Call] = []
        for it, functions in zip(dialogues, asked, strict=True):
            for function in functions:
                name, arguments = function["name"], function["arguments"]
                text = ""
                if name not in names:
                    text = f"Tool {name} not found."
                elif not isinstance(arguments, dict):
                    text = f"The arguments of {name} are not an object."
                found.append(Result(kind="failed", text=text) if text else None)
                if not text:
                    methods = self._offer.methods
                    calls.append(Call(it.number, name, arguments, name in methods))
        made = iter(self._calling.results(calls))
        return [next(made) if result is None else result for result in found]

    def _step(
        self, it: Dialogue, turn: Turn, asked: Sequence[Message], results: Sequence[Result],
        most: int,
    ) -> Step:  # fmt: skip
        """Return what follows a turn."""
        if not asked:
            return Step(
                message=turn.message, finished=it.ended and not turn.calls,
                malformed=it.ended and turn.malformed,
            )  # fmt: skip
        if any(result.kind == "lost" for result in results):
            return Step(message=turn.message)
        messages = [
            {"role": "tool", "name": call["name"], "content": content_of(result)}
            for call, result in zip(asked, results, strict=True)
        ]
        ended = it.tokens[-1] in self._template.ends
        suffix = self._template.suffix(messages, it.keywords, ended=ended)
        size = len(it.tokens) + len(suffix)
        if size >= it.room or len(it.prompt) + size >= most:
            # There is no room for the results and another token.
            return Step(message=turn.message)
        return Step(message=turn.message, results=messages, suffix=suffix)


def content_of(result: Result) -> str:
    """Return the content of the message with a result; that of a failed call is as in TRL. Half a
    surrogate pair, which no tokenizer takes, becomes a question mark."""
    text = str({"error": result.text}) if result.kind == "failed" else str(result.value)
    return text.encode("utf-8", "replace").decode()
