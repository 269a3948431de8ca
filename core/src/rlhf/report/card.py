"""The model card `README.md` of an exported model, from the run folder.

Data and models are named as in the configuration, but of a path outside the working folder only the
last part is written. Where a run reports to, and what it may hold of the machine, is left out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.utils import HFValidationError, validate_repo_id

from rlhf.folder.run_folder import EXTRA_FILE
from rlhf.report.chart import number
from rlhf.report.recorded import Curve, Recorded, read_run

LEFT_OUT = ("output", "observers", "checkpoint", "extensions")
"""Sections that do not say how the model came about."""
POINTS = 10
"""Rows of the table of the curve."""
CARD = """\
# {title}

A {kind} trained with rlhf (trainer `{trainer}`) from `{base}`, to step {step}.

## Use

```python
{transformers}
```

{vllm}
{extra}
## Data

{data}

## Metrics

{curve}

## Configuration

```yaml
{config}
```

## Versions

{versions}

## License

Set `license` at the top of this file before you publish the model. The licenses of the base model
and of the data apply to it.
"""
EXTRA = f"""
`{EXTRA_FILE}` has parameters of the trainer's own, which neither transformers nor vLLM reads:

```python
from rlhf.readouts import exported_extra

parameters = exported_extra(path)  # tensors by name
```
"""
TASKS = {
    "causal": ("language model", "text-generation", "ForCausalLM"),
    "sequence": ("reward model", "text-classification", "ForSequenceClassification"),
    "token": ("process reward model", "token-classification", "ForTokenClassification"),
}
"""By task: what the card calls a model, its pipeline on the hub, and the end of the names of the
auto classes in transformers and peft."""


def write_card(
    folder: Path, run: Path, *, role: str = "policy", until: float = float("inf")
) -> None:
    """Write the card of the model in `folder`, which the run in `run` had trained up to the step
    `until`."""
    recorded = read_run(run, until=until)
    (folder / "README.md").write_text(card(recorded, folder, role))


def card(run: Recorded, folder: Path, role: str = "policy") -> str:
    """Return the card of a model: its head in YAML, then text."""
    plan = run.plan.get(role, {})
    model = plan.get("model") or run.config.get("model") or {}
    task, base = plan.get("task") or "causal", name_of(str(model.get("path", "")))
    adapter, trainer = (folder / "adapter_config.json").is_file(), name_of(run.trainer)
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    if is_hub_name(base):
        head["base_model"] = base
    sources = [name_of(entry["path"]) for entry in (run.config.get("data") or {}).get("train", [])]
    if published := [source for source in sources if is_hub_name(source)]:
        head["datasets"] = published
    kind, pipeline, auto_class = TASKS[task]
    head |= {"pipeline_tag": pipeline, "license": "unknown", "tags": ["rlhf", trainer]}
    versions = (
        f"{name} {version}"
        for name, version in run.versions.items()
        if name not in ("trainer", "trust_remote_code")
    )
    text = CARD.format(
        title=f"{base.rsplit('/')[-1]} ({trainer})", trainer=trainer, base=base,
        kind=f"LoRA adapter of a {kind}" if adapter else kind, step=run.step,
        transformers=_transformers(auto_class, adapter=adapter), vllm=_vllm(task, base, folder),
        extra=EXTRA if (folder / EXTRA_FILE).is_file() else "", data=_data(run),
        curve=_curve(run.curves), config=_configuration(run.config), versions=", ".join(versions),
    )  # fmt: skip
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{text}"


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


def _transformers(auto_class: str, *, adapter: bool) -> str:
    name = f"{'AutoPeftModel' if adapter else 'AutoModel'}{auto_class}"
    imports = f"from transformers import AutoTokenizer, {name}"
    if adapter:
        imports = f"from peft import {name}\nfrom transformers import AutoTokenizer"
    return (
        f'{imports}\n\npath = "MODEL"  # this folder, or its name on a hub\n'
        f"model = {name}.from_pretrained(path)\ntokenizer = AutoTokenizer.from_pretrained(path)"
    )


def _vllm(task: str, base: str, folder: Path) -> str:
    file = folder / "adapter_config.json"
    adapter = json.loads(file.read_text()) if file.is_file() else None
    pooling = " --runner pooling" * (task != "causal")
    if adapter is None:
        return f"```bash\nvllm serve MODEL{pooling}\n```"
    if any(adapter.get(key) for key in ("use_dora", "modules_to_save", "target_parameters")):
        return (
            "For vLLM, first merge the adapter with `rlhf merge MODEL MERGED`, then run\n"
            f"```bash\nvllm serve MERGED{pooling}\n```"
        )
    return f"```bash\nvllm serve {base} --enable-lora --lora-modules adapter=MODEL\n```"


def _data(run: Recorded) -> str:
    lines = []
    for part in ("train", "eval"):
        paths = [
            f"`{name_of(it['path'])}`" for it in (run.config.get("data") or {}).get(part) or []
        ]
        counts = (run.summary.get("data") or {}).get(part)
        text = f"- {part}: {', '.join(paths)}"
        if counts:
            text += f"; {counts['rows']:,} rows, {counts['examples']:,} examples, "
            text += f"{counts['tokens']:,} tokens, {counts['trained']:,} of them trained on"
        lines += [text] * bool(paths)
    return "\n".join(lines)


def _curve(curves: Mapping[str, Curve]) -> str:
    """Return a table of the loss at a few steps and all metrics of the held-out rows."""
    names = [name for name in curves if name == "loss" or name.startswith("eval/")]
    by_step: dict[int, dict[str, float]] = {}
    for name in names:
        for step, value in curves[name]:
            by_step.setdefault(step, {})[name] = value
    measured = sorted(
        step for step, values in by_step.items() if len(values) > 1 or "loss" not in values
    )
    steps = measured or sorted(by_step)
    if len(steps) > POINTS:
        steps = [steps[place * (len(steps) - 1) // (POINTS - 1)] for place in range(POINTS)]
    rows = [["step", *names], ["---:"] * (1 + len(names))]
    rows += [[str(step), *(number(by_step[step].get(name)) for name in names)] for step in steps]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _configuration(config: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in LEFT_OUT}
    return yaml.safe_dump(_without_places(kept), sort_keys=False, allow_unicode=True).rstrip()


def _without_places(value: Any) -> Any:
    """Return a tree without empty values, in which paths are named as in `name_of`."""
    if isinstance(value, Mapping):
        tree = {key: _without_places(each) for key, each in value.items()}
        return {key: each for key, each in tree.items() if each not in (None, [], {}, ())}
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    return name_of(value) if isinstance(value, str) and "/" in value else value
