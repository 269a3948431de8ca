"""Exported models opened again."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from rlhf.errors import RLHFError
from rlhf.model.task import FORMS, Form
from rlhf.model.trainable import adapter_settings, load_adapter
from rlhf.model.weights import first_line, quiet


def exported_model(folder: Path, form: Form, *, dtype: Any = "auto") -> Any:
    """The model in a run's `model/`, or its adapter over its base, through plain transformers and
    peft. Raises RLHFError where it does not load."""
    adapted = (folder / "adapter_config.json").is_file()
    base = adapter_settings(str(folder)).base_model_name_or_path if adapted else str(folder)
    # A classifier's folder says what its head gives and how to pad; a language model's is its base,
    # unless its trainer left word in a config.json of its own.
    described = (folder / "config.json").is_file()
    options = {"config": AutoConfig.from_pretrained(folder)} if described else {}
    try:
        with quiet():
            model, report = form.auto.from_pretrained(
                base, dtype=dtype, weights_only=True, output_loading_info=True, **options
            )
    except Exception as error:  # A damaged folder may raise anything.
        if not adapted:
            raise RLHFError(
                f"{folder} does not load ({first_line(error)}): give the model/ folder of a run"
            ) from error
        raise RLHFError(
            f"the base model {base} of {folder} does not load: correct base_model_name_or_path in "
            "its adapter_config.json"
        ) from error
    if adapted:
        return load_adapter(model, str(folder), trained=False)
    if report["missing_keys"]:
        # transformers would go on with random numbers.
        raise RLHFError(
            f"{folder} has no {min(report['missing_keys'])}, so it is no {type(model).__name__}: "
            "give the model/ folder of a run that trained one"
        )
    return model


def form_of(task_type: str | None) -> Form:
    """The task that peft calls so."""
    return next((form for form in FORMS.values() if form.peft == task_type), FORMS["causal"])
