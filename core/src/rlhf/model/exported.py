"""Exported models opened again, in plain transformers and peft."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from rlhf.errors import RLHFError, first_line
from rlhf.model.architecture import DTYPES
from rlhf.model.task import FORMS, Task
from rlhf.model.weights import quiet_transformers


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
    # A classifier's adapter folder has a config.json for its head and padding. A language model's
    # has one only if its trainer wrote settings there.
    described = (folder / "config.json").is_file()
    try:
        with quiet_transformers():
            options = {"config": AutoConfig.from_pretrained(folder)} if described else {}
            model, report = FORMS[task].auto.from_pretrained(
                base,
                revision=revision,
                dtype=DTYPES.get(dtype, dtype),
                weights_only=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # A damaged folder may raise anything.
        if not adapted:
            raise RLHFError(
                f"cannot load {folder} ({first_line(error)}); pass the model/ folder of a run"
            ) from error
        raise RLHFError(
            f"cannot load the base model {base} of {folder} ({first_line(error)}); correct "
            "base_model_name_or_path in its adapter_config.json"
        ) from error
    if adapted:
        return load_adapter(model, str(folder), trained=False)
    if report["missing_keys"]:
        # transformers would continue with random numbers.
        raise RLHFError(
            f"{folder} has no {min(report['missing_keys'])}, so it is not a "
            f"{type(model).__name__}; pass the model/ folder of a run that trained one"
        )
    return model


def exported_tokenizer(folder: Path | str) -> Any:
    """Return the tokenizer in a run's `model/` folder. Raises RLHFError if it does not load."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # A damaged folder may raise anything.
        raise RLHFError(
            f"cannot load the tokenizer in {folder} ({first_line(error)}); pass the model/ folder "
            "of a run"
        ) from error


def task_of(task_type: str | None) -> Task:
    """Return the task that peft names `task_type`; `causal` for an unknown one."""
    return next((task for task, form in FORMS.items() if form.peft == task_type), "causal")
