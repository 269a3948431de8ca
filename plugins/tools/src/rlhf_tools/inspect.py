"""`rlhf inspect NAME ...`: the rows as the model sees them, and how they fill the micro-batches.
Reads no weights."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from rlhf.cli import Request
from rlhf.errors import counted
from rlhf.plugin import Config
from rlhf.preview import Dataset, prepare_data
from rlhf.trainer import Answer, Example, Examples

SHOWN_ROWS = 3
SHOWN_STEPS = 50
SHOWN_TOKENS = 400
"""The middle of a longer run of tokens is left out."""
REPEATED = 16
"""A token that is repeated at least as often is shown once."""
BINS, BAR = 8, 40
PROMPT, TRAINED, UNTRAINED = "dim", "green", "yellow"


def inspect_command(request: Request, console: Console | None = None) -> int:
    """Show rows, their lengths and how full the micro-batches are on one device. Returns the exit
    code 0."""
    console = console or Console(highlight=False)
    data = prepare_data(request)
    config = data.with_token_budget(request.config)
    train, tokenizer = data.train, data.trainer.tokenizer
    for which, examples in data.parts.items():
        show_report(which, examples, console)
    console.print(_legend())
    for number in range(min(SHOWN_ROWS, len(train))):
        show_example(train[number], train.name(number), train.value_kinds, tokenizer, console)
        for line in train.images(number):
            console.print(Text(line, style=PROMPT))
    console.print(Text("\ntokens per example", style="bold"))
    show_histogram(train.lengths, console)
    show_steps(data, config, console)
    return 0


def show_report(which: str, examples: Examples, console: Console) -> None:
    """Show how many rows of `data.WHICH` are used, and which were lost."""
    report = examples.report
    console.print(Text(f"{which}: {report}", style="bold"))
    lines = [
        f"{reason.replace('_', ' ')}: {', '.join(rows)}" for reason, rows in report.lost.items()
    ]
    if warning := report.warning(which):
        lines.append(f"warning: {warning}")
    for line in lines:
        console.print(Text(f"  {line}", style=UNTRAINED))


def show_example(
    example: Example, name: str, kinds: Mapping[str, str], tokenizer: Any, console: Console
) -> None:
    """Show a tree: its prompt, then its answers; the colour says what is trained on. `kinds` says
    what each of its values is per, as `Examples.value_kinds`."""
    sizes = " + ".join(str(len(answer.tokens)) for answer in example.answers)
    title = f"{name}: {len(example.prompt)} prompt tokens"
    title += f", {sizes} in answers" if example.answers else ""
    console.print(Text(f"\n{title}", style="bold"))
    text = _run_of(example.prompt, tokenizer, PROMPT)
    per_token = {name: value for name, value in example.values.items() if kinds[name] == "token"}
    for number, answer in enumerate(example.answers):
        if len(example.answers) > 1:
            text.append(f"\n[answer {number + 1}] ", style="bold")
        labels = _labels({name: value[number] for name, value in per_token.items()})
        text.append_text(_answer(answer, labels, tokenizer))
    console.print(text)
    for key, value in example.values.items():
        if key not in per_token:
            console.print(Text(f"{key}: {_brief(value)}", style=PROMPT))


def show_histogram(lengths: NDArray[np.int64], console: Console) -> None:
    """Show how many examples have how many tokens, as bars."""
    counts, edges = np.histogram(lengths, bins=min(BINS, int(np.ptp(lengths)) + 1))
    lows = np.ceil(edges).astype(int)
    # Only the last bin has its upper edge in it.
    highs = [*(lows[1:-1] - 1), int(edges[-1])]
    for count, low, high in zip(counts, lows, highs, strict=False):
        bar = "#" * round(BAR * count / counts.max())
        console.print(Text(f"  {low:>7} to {high:>7}  {bar} {count:,}"))


def show_steps(data: Dataset, config: Config, console: Console) -> None:
    """Show how many steps an epoch has, and how they fill micro-batches on one device."""
    steps = counted(data.steps_per_epoch(config), "step")
    size = counted(config.batch.size, "example")
    fill = "the run samples the answers that fill its micro-batches"
    if not data.trainer.needs_rollout():
        fill = fill_of(data, config)
    console.print(Text(f"\n{steps} of {size} per epoch; {fill}"))


def fill_of(data: Dataset, config: Config) -> str:
    """Return how many micro-batches the first steps take on one device, and how full they are."""
    budget, order = config.batch.budget, data.order(config)
    plans = [order.step(number) for number in range(min(SHOWN_STEPS, order.steps_per_epoch))]
    micro = [len(plan.micro) for plan in plans]
    few, many = min(micro), max(micro)
    count = f"{few} to {many}" if few < many else f"{many}"
    tokens = sum(int(plan.lengths.sum()) for plan in plans)
    fill = tokens / (sum(micro) * budget)
    return (
        f"on one device {count} micro-batch{'es' if many > 1 else ''} per step, "
        f"{100 * fill:.0f} % of batch.tokens {budget} filled; "
        f"{tokens / len(plans):,.0f} tokens per step"
    )


def _answer(answer: Answer, labels: Mapping[int, str], tokenizer: Any) -> Text:
    """Return an answer as text with its `labels`, whose keys count the tokens before them."""
    size, text = len(answer.tokens), Text()
    mask = np.ones(size, bool) if answer.trained is None else np.asarray(answer.trained)
    edges = sorted({*(np.flatnonzero(np.diff(mask)) + 1).tolist(), *labels, size})
    for low, high in itertools.pairwise([0, *edges]):
        style = TRAINED if mask[low] else UNTRAINED
        text.append_text(_run_of(answer.tokens[low:high], tokenizer, style))
        text.append(labels.get(high, ""), style="bold")
    return text


def _labels(values: Mapping[str, Any]) -> dict[int, str]:
    """Return the `values` per token of an answer as text, by the number of tokens before it. Equal
    values of consecutive tokens are shown once, after the last of them."""
    shown: dict[int, str] = {}
    for name, value in values.items():
        row = np.asarray(value, float)
        for place in np.flatnonzero(~np.isnan(row) & (row != [*row[1:], np.nan])).tolist():
            shown[place + 1] = f"{shown.get(place + 1, '')}[{name} {row[place]:g}]"
    return shown


def _legend() -> Text:
    return Text.assemble(
        "\n", ("prompt", PROMPT), "  ", ("trained on", TRAINED), "  ", ("not trained on", UNTRAINED)
    )


def _run_of(tokens: Sequence[int], tokenizer: Any, style: str) -> Text:
    """Return the tokens as text, including special ones; invalid bytes become a replacement
    mark."""
    ids = [int(token) for token in tokens]
    repeated = max((len([*run]) for _, run in itertools.groupby(ids)), default=0)
    if repeated >= REPEATED:
        return _with_counts(ids, tokenizer, style)
    if len(ids) <= SHOWN_TOKENS:
        return Text.assemble((tokenizer.decode(ids), style))
    half = SHOWN_TOKENS // 2
    left_out = f" ... {len(ids) - 2 * half} tokens ... "
    return Text.assemble(
        (tokenizer.decode(ids[:half]), style), left_out, (tokenizer.decode(ids[-half:]), style)
    )


def _with_counts(ids: Sequence[int], tokenizer: Any, style: str) -> Text:
    """Return tokens as text in which one that is repeated, as those of an image are, stands once
    with its number."""
    text, rest = Text(), list[int]()
    for token, run in itertools.groupby(ids):
        count = len([*run])
        if count < REPEATED:
            rest += [token] * count
            continue
        text.append_text(_run_of(rest, tokenizer, style))
        text.append(f"{tokenizer.decode([token])} x {count}", style=style)
        rest = []
    return text.append_text(_run_of(rest, tokenizer, style))


def _brief(value: Any) -> str:
    if not hasattr(value, "__len__"):
        return f"{value:g}"
    return f"[{', '.join(map(_brief, value))}]"
