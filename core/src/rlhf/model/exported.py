"""Exported models opened again, in plain transformers and peft."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rlhf.config.sections import ModelConfig
from rlhf.errors import RLHFError, first_line, listed
from rlhf.model.architecture import DTYPES, config_in, needs_code, settle_tying
from rlhf.model.stored import TEMPLATES, TOKENIZER, WEIGHTS, damaged_file
from rlhf.model.task import FORMS, Task, auto_class, head_weights
from rlhf.model.tying import check_tied
from rlhf.model.weights import quiet_transformers, unread_weights, warn_of_unused

READ = ("config.json", *WEIGHTS)
"""Files of a model folder that are read to load it."""


def exported_model(folder: Path | str, task: Task, *, dtype: Any = "auto") -> Any:
    """Return the model in a run's `model/` folder, through plain transformers and peft; an adapter
    is put on its base. `task` is `causal`, `sequence` or `token`. `dtype` is `fp32`, `bf16`,
    `fp16`, a torch.dtype, or `auto` for that of the folder.

    Raises RLHFError for a folder that does not load or holds a model of another task.
    """
    folder = Path(folder)
    adapted = (folder / "adapter_config.json").is_file()
    base, revision = str(folder), None
    if adapted:
        from rlhf.model.adapters import adapter_settings, load_adapter  # late: start-up time

        settings = adapter_settings(base)
        base, revision = settings.base_model_name_or_path, settings.revision
        if not base:
            raise RLHFError(
                f"{folder} names no base model; set base_model_name_or_path in its "
                "adapter_config.json"
            )
    # A classifier's adapter folder has a config.json for its head and padding. A language model's
    # has one only if its trainer wrote settings there.
    described = (folder / "config.json").is_file()
    try:
        with quiet_transformers():
            architecture = config_in(folder) if described else config_in(base, revision=revision)
            settle_tying(architecture, ModelConfig(path=base, revision=revision), task)
            model, report = auto_class(architecture, task).from_pretrained(
                base,
                config=architecture,
                revision=revision,
                dtype=DTYPES.get(dtype, dtype),
                trust_remote_code=False,
                weights_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # A damaged folder may raise anything.
        name, remedy = str(folder), "pass the model/ folder of a run"
        if adapted:
            name = f"the base model {base} of {folder}"
            remedy = "correct base_model_name_or_path in its adapter_config.json"
        if needs_code(error):
            raise not_run(name) from error
        damaged = damaged_file(folder, READ) or damaged_file(base, READ)
        raise damaged or RLHFError(f"cannot load {name} ({first_line(error)}); {remedy}") from error
    check_tied(model, base)
    report["unexpected_keys"].update(unread_weights(model, base, revision))
    warn_of_unused(base, model, report["unexpected_keys"])
    if adapted:
        missing = sorted(report["missing_keys"] - head_weights(model))
        if missing:
            raise RLHFError(
                f"the base model {base} of {folder} has no weights for {listed(missing)} of "
                f"{type(model).__name__}; restore it, or correct base_model_name_or_path in "
                "adapter_config.json"
            )
        return load_adapter(model, str(folder), trained=False)
    if report["missing_keys"]:
        # transformers would continue with random numbers.
        raise RLHFError(
            f"{folder} has no {listed(sorted(report['missing_keys']))}, so it is not a "
            f"{type(model).__name__}; pass the model/ folder of a run that trained one"
        )
    return model


def exported_tokenizer(folder: Path | str) -> Any:
    """Return the tokenizer in a run's `model/` folder. Raises RLHFError if it does not load."""
    if damaged := damaged_file(folder, TEMPLATES):
        raise damaged
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # A damaged folder may raise anything.
        if needs_code(error):
            raise not_run(f"the tokenizer in {folder}") from error
        raise damaged_file(folder, TOKENIZER) or RLHFError(
            f"cannot load the tokenizer in {folder} ({first_line(error)}); pass the model/ folder "
            "of a run"
        ) from error


def not_run(name: Path | str) -> RLHFError:
    """Return the error for what has Python code of its own, which an export is opened without."""
    return RLHFError(
        f"{name} needs Python code that comes with it, which only runs and rlhf export may run; "
        "use transformers and peft in a script of your own, with trust_remote_code=True"
    )


def task_of(task_type: str | None) -> Task:
    """Return the task that peft names `task_type`; `causal` for an unknown one."""
    return next((task for task, form in FORMS.items() if form.peft == task_type), "causal")
