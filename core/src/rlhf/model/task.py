"""The heads on a backbone: a language model's, a score per sequence, or scores per token."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from attrs import frozen
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rlhf.errors import RLHFError

Task = Literal["causal", "sequence", "token"]
"""The head on the backbone: a language model's, one score per sequence, or scores per token (the
transformers classes ForCausalLM, ForSequenceClassification, ForTokenClassification)."""

HEAD_NAMES = ("score", "classifier")
"""transformers' names for the linear layer of a classifier on a decoder."""


@frozen(kw_only=True)
class Form:
    """What a task is in transformers and peft."""

    auto: Any
    """The auto class that opens such a model."""
    labels: tuple[str, ...] = ()
    """Names of the head's outputs by default; empty for the vocabulary."""
    peft: str = "CAUSAL_LM"
    """peft's name of the task; for a classifier peft trains and saves the head."""

    @property
    def suffix(self) -> str:
        """Suffix of its model classes' names."""
        return self.auto.__name__.removeprefix("AutoModel")

    def supports(self, architecture: Any) -> bool:
        """Return whether transformers, or the model's own code, has a class for the task."""
        has_code = self.auto.__name__ in (getattr(architecture, "auto_map", None) or {})
        return has_code or type(architecture) in self.auto._model_mapping


FORMS: dict[Task, Form] = {
    "causal": Form(auto=AutoModelForCausalLM),
    "sequence": Form(auto=AutoModelForSequenceClassification, labels=("reward",), peft="SEQ_CLS"),
    "token": Form(
        auto=AutoModelForTokenClassification, labels=("wrong", "right"), peft="TOKEN_CLS"
    ),
}


def auto_class(architecture: Any, task: Task, part: str = "whole") -> Any:
    """Return the auto class that opens a model: that of the class which its config names, if this
    also reads images, unless only its `part` text is asked for; else that of `task`."""
    whole = task == "causal" and part == "whole" and reads_images(architecture)
    return AutoModelForImageTextToText if whole else FORMS[task].auto


def reads_images(architecture: Any) -> bool:
    """Return whether a config names a model that also reads images: a language model, or a
    classifier that was made from one."""
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(architecture.model_type)
    written = written_class(architecture)
    classifiers = tuple(form.suffix for form in FORMS.values() if form.labels)
    return whole is not None and (written == whole or written.endswith(classifiers))


def has_text_class(architecture: Any) -> bool:
    """Return whether transformers has a class for the text part of a model that reads images, which
    AutoModelForCausalLM opens. That of Gemma 3 and 4 opens the whole model."""
    text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(architecture.model_type)
    return reads_images(architecture) and text not in (
        None, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[architecture.model_type]
    )  # fmt: skip


def names_of_labels(task: Task, labels: int | None) -> tuple[str, ...]:
    """Return the names of a head's outputs: so many `labels`, by default those of the task.

    Raises RLHFError for an unknown task, and for labels of a language model.
    """
    if task not in FORMS:
        raise RLHFError(f"run.load(): task {task!r} is unknown; available: {', '.join(FORMS)}")
    names = FORMS[task].labels
    if labels is None or labels == len(names) > 0:
        return names
    if task == "causal" or labels < 1:
        raise RLHFError(
            f"run.load(): task {task!r} cannot have {labels} labels; "
            "use sequence or token with at least one"
        )
    return tuple(f"LABEL_{number}" for number in range(labels))


def prepare_architecture(architecture: Any, task: Task, labels: int | None, path: str) -> None:
    """Set the labels of `task` in a causal family's config, in place. Raises RLHFError for labels
    that the task cannot have and for a family or a model that cannot be such a classifier."""
    names = names_of_labels(task, labels)
    if task == "causal":
        return
    check_classifier(architecture, task, names, path)
    architecture.id2label = dict(enumerate(names))
    architecture.label2id = {name: number for number, name in enumerate(names)}


def check_classifier(
    architecture: Any, task: Task, names: Sequence[str], path: str, *, otherwise: str = ""
) -> None:
    """Raise RLHFError if the family has no class for `task`, or `path` holds another classifier
    than one whose head has the labels `names`. `otherwise` is what else the trainer can do."""
    form = FORMS[task]
    if not form.supports(architecture):
        such = "qwen3_5" if reads_images(architecture) else "llama, qwen3 or mistral"
        raise RLHFError(
            f"transformers has no {form.auto.__name__} for {architecture.model_type} "
            f"(model.path {path}); choose a family that has one, such as {such}"
            + (f", or {otherwise}" if otherwise else "")
        )
    written = written_class(architecture)
    others = [other.suffix for name, other in FORMS.items() if name not in ("causal", task)]
    if written.endswith(tuple(others)):
        raise RLHFError(
            f"model.path {path} is {written}, whose head is not for "
            f"{form.suffix.removeprefix('For')}; choose the language model it was trained from"
        )
    if written.endswith(form.suffix) and architecture.num_labels != len(names):
        raise RLHFError(
            f"model.path {path} is {written} with {architecture.num_labels} labels, but this "
            f"trainer's head has {len(names)} ({', '.join(names)}); choose the "
            "language model it was trained from"
        )


def written_class(architecture: Any) -> str:
    """Return the model class that a config names for its weights, or an empty string."""
    names = getattr(architecture, "architectures", None)
    first = names[0] if isinstance(names, list) and names else names
    return first if isinstance(first, str) else ""


def label_head(model: Any) -> tuple[str, nn.Module] | None:
    """Return name and module of a classifier's linear layer (under peft the trained one); None for
    a language model."""
    for name, child in model.named_children():
        if name in HEAD_NAMES:
            trained = getattr(child, "modules_to_save", None)
            if trained is not None and not child.disable_adapters:
                return name, trained[child.active_adapters[0]]
            return name, getattr(child, "original_module", child)
    return None


def head_weights(model: Any) -> set[str]:
    """Return the names of the weights of a classifier's linear layer; none of a language model."""
    labels = label_head(model)
    return {f"{labels[0]}.{part}" for part, _ in labels[1].named_parameters()} if labels else set()


def draw_head(model: Any, seed: int) -> None:
    """Draw new values for a classifier's head from `seed`.

    They are drawn on the host in float32, so they are the same for any rank, stage and device; as
    in transformers, normal with the family's `initializer_range`, and zero for the bias.
    """
    labels = label_head(model)
    assert labels is not None, f"{type(model).__name__} has no head of labels"
    head: Any = labels[1]
    spread = getattr(model.config.get_text_config(), "initializer_range", None) or 0.02
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        values = torch.empty(head.weight.shape).normal_(0.0, spread, generator=generator)
        head.weight.copy_(values)
        if head.bias is not None:
            head.bias.zero_()
