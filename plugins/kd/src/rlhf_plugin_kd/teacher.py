"""The teacher, as an engine or from disk, once it is known to have the student's tokens."""

from typing import Any

import attrs

from rlhf.engine import Engine
from rlhf.errors import RLHFError
from rlhf.model.architecture import read_architecture
from rlhf.model.tokenizer import load_tokenizer
from rlhf.plugin import Config, ModelConfig
from rlhf.reference.teacher import CachedTeacher, cached_teacher, running_teacher
from rlhf_plugin_kd.config import KDConfig


def load_teacher(run: Any, config: KDConfig) -> Engine | CachedTeacher:
    """The engine of role `teacher`, in the student's precision and under a plan of its own, or what
    is on disk of it. Collective. Raises RLHFError for one that does not fit the student, before any
    weight is read."""
    model = ModelConfig(
        path=config.teacher, revision=config.teacher_revision, dtype=run.config.model.dtype
    )
    size = check_vocabulary(run.config, attrs.evolve(run.config, model=model), run.tokenizer)
    if config.cache_top is None:
        return running_teacher(run, model)
    if config.cache_top >= size:
        raise RLHFError(
            f"kd.cache_top {config.cache_top} leaves none of the {size} tokens over: choose fewer, "
            "or run the teacher beside the student without kd.cache_top"
        )
    return cached_teacher(run, model, top=config.cache_top, temperature=config.temperature)


def check_vocabulary(student: Config, teacher: Config, tokenizer: Any) -> int:
    """The size of the vocabulary. Raises RLHFError unless both predict over the very same tokens;
    reads configurations and tokenizers alone, no weights."""
    path = teacher.model.path
    architectures = (read_architecture(student), read_teacher(teacher))
    sizes = [found.get_text_config().vocab_size for found in architectures]
    if sizes[0] != sizes[1]:
        raise RLHFError(
            f"kd.teacher {path} predicts over {sizes[1]} tokens but the student "
            f"{student.model.path} over {sizes[0]}: choose a teacher with the student's vocabulary"
        )
    own, other = tokenizer.get_vocab(), load_tokenizer(teacher).get_vocab()
    differ = sorted(own.items() ^ other.items(), key=lambda item: (item[1], item[0]))
    if differ:
        token, number = differ[0]
        raise RLHFError(
            f"kd.teacher {path} has other tokens than the student {student.model.path}, although "
            f"both have {sizes[0]} (the first is {token!r}, {number}): choose a teacher with the "
            "student's tokenizer"
        )
    return int(sizes[0])


def read_teacher(config: Config) -> Any:
    """The teacher's architecture; an error calls it by the setting that names it."""
    try:
        return read_architecture(config)
    except RLHFError as error:
        raise RLHFError(str(error).replace("model.path", "kd.teacher", 1)) from error
