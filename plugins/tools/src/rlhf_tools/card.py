"""The model card `README.md` of an exported model, from the run folder.

Data and models are named as in the configuration, but of a path outside the working folder only the
last part is written. Where a run reports to, and what it may hold of the machine, is left out.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id

from rlhf.cli import EXTRA_FILE, load_yaml, read_json, read_lines
from rlhf.errors import RLHFError
from rlhf_tools.template import filled

LEFT_OUT = ("output", "observers", "checkpoint", "extensions")
"""Sections that do not say how the model came about."""
COUNTS = ("rows", "examples", "tokens", "trained")
"""What the card says of data."""
POINTS = 10
"""Rows of the table of the curve."""
TASKS = {
    "causal": ("language model", "text-generation", "ForCausalLM"),
    "images": ("vision-language model", "image-text-to-text", "ForImageTextToText"),
    "sequence": ("reward model", "text-classification", "ForSequenceClassification"),
    "token": ("process reward model", "token-classification", "ForTokenClassification"),
}
"""By task, or `images` for a language model that also reads images: what the card calls a model,
its pipeline on the hub, and the end of the names of the auto classes in transformers and peft."""
PLAIN = (
    *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path"),
    *("revision", "inference_mode", "r", "lora_alpha", "use_rslora", "lora_dropout"),
    *("target_modules", "exclude_modules", "init_lora_weights", "fan_in_fan_out"),
    # They have an effect only beside other settings.
    *("megatron_core", "qalora_group_size", "ensure_weight_tying"),
)
"""Settings of an adapter with which vLLM computes what peft does. With any other, such as
`use_dora`, the adapter has to be merged."""


def write_card(folder: Path, run: Path, *, role: str, until: float) -> None:
    """Write the card of the model in `folder`: see `rlhf.plugin.ExportPlugin`."""
    records = [line for line in read_lines(run / "metrics.jsonl") if line is not None]
    text = card(run, folder, role, [line for line in records if line["step"] <= until])
    (folder / "README.md").write_text(text, encoding="utf-8")


def card(run: Path, folder: Path, role: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Return the card of a model of a run with these lines of metrics.jsonl: its head in YAML, then
    text."""
    config: dict[str, Any] = {}
    with suppress(RLHFError):  # A file that is missing or damaged.
        config = load_yaml(run / "config.yaml")
    plan = read_json(run / "plan.json").get(role, {})
    versions, summary = read_json(run / "versions.json"), read_json(run / "summary.json")
    model = plan.get("model") or config.get("model") or {}
    task, images = plan.get("task") or "causal", any(folder.glob("*processor_config.json"))
    kind, pipeline, suffix = TASKS["images" if images and task == "causal" else task]
    base = name_of(str(model.get("path", "")))
    trainer = Path(str(versions.get("trainer", ""))).name
    adapter = read_json(folder / "adapter_config.json")
    data = {
        part: [name_of(entry["path"]) for entry in (config.get("data") or {}).get(part) or []]
        for part in ("train", "eval")
    }
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    if is_hub_name(base):
        head["base_model"] = base
    if published := [source for source in data["train"] if is_hub_name(source)]:
        head["datasets"] = published
    head |= {"pipeline_tag": pipeline, "license": "unknown", "tags": ["rlhf", trainer]}
    names, rows = _curve(records)
    counts_of = summary.get("data") or {}
    return filled(
        Path(__file__).with_name("card.jinja"),
        step=records[-1]["step"] if records else 0, head=head, base=base, trainer=trainer,
        kind=kind, pipeline=pipeline, suffix=suffix, images=images, data=data,
        counts_of={part: it for part, it in counts_of.items() if {*COUNTS} <= {*it}},
        adapted=bool(adapter), needs_merge=needs_merge(adapter),
        extra=EXTRA_FILE if (folder / EXTRA_FILE).is_file() else "", names=names, rows=rows,
        config=_without_places({k: v for k, v in config.items() if k not in LEFT_OUT}),
        versions=[f"{name} {version}" for name, version in versions.items()
                  if name not in ("trainer", "trust_remote_code")],
    )  # fmt: skip


def needs_merge(adapter: Mapping[str, Any]) -> bool:
    """Return whether an adapter has a setting that is not known to be plain."""
    return any(
        value and value != "none"  # peft's value of `bias` for none.
        for name, value in adapter.items()
        if name not in PLAIN
    )


def name_of(path: str) -> str:
    """Return a path as the card names it: a hub name and a path in the working folder as they are,
    of any other path the last part."""
    inside = not path.startswith(("/", "~")) and ".." not in Path(path).parts
    return path if inside else Path(path).name


def is_hub_name(name: str) -> bool:
    """Return whether a name is OWNER/NAME of a hub and no folder here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not Path(name).exists()


def _curve(
    records: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[tuple[int, list[float | None]]]]:
    """Return the names of the loss and of all metrics of the held-out rows, and at a few steps
    their finite values."""
    by_step: dict[int, dict[str, float]] = {}
    for record in records:
        for name, value in record.items():
            is_shown = name == "loss" or name.startswith("eval/")
            if is_shown and isinstance(value, int | float) and math.isfinite(value):
                by_step.setdefault(record["step"], {})[name] = value
    names = [*dict.fromkeys(chain(*by_step.values()))]
    measured = sorted(
        step for step, values in by_step.items() if len(values) > 1 or "loss" not in values
    )
    steps = measured or sorted(by_step)
    if len(steps) > POINTS:
        steps = [steps[place * (len(steps) - 1) // (POINTS - 1)] for place in range(POINTS)]
    return names, [(step, [by_step[step].get(name) for name in names]) for step in steps]


def _without_places(value: Any) -> Any:
    """Return a tree without empty values, in which paths are named as in `name_of`."""
    if isinstance(value, Mapping):
        tree = {key: _without_places(each) for key, each in value.items()}
        return {key: each for key, each in tree.items() if each not in (None, [], {}, ())}
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    return name_of(value) if isinstance(value, str) and "/" in value else value
