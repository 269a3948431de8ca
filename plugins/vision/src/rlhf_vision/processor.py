"""The processor of a checkpoint: it prepares images, says how many features each has, and with the
model's class computes the positions of tokens around them."""

import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoProcessor,
    AutoTokenizer,
    ProcessorMixin,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import logging

from rlhf.errors import RLHFError, first_line
from rlhf.formats import BadImage
from rlhf.plugin import ModelConfig
from rlhf_vision.opening import DROP
from rlhf_vision.rows import Placeholders

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which processors return what kind each token is of."""
NO_IMAGE = ("input_ids", "attention_mask", "text_replacement_offsets", *TYPES)
Arrays = dict[str, NDArray[Any]]


@frozen(eq=False)
class Prepared:
    """Images that the processor has prepared together."""

    texts: list[str]
    """What each placeholder becomes."""
    arrays: Arrays
    """The inputs of the model."""


class Processor:
    """The processor of a model, and its rule of positions."""

    def __init__(self, model: ModelConfig) -> None:
        """Raises RLHFError for a model that reads no images, and without a package that its
        processor needs."""
        self._processor: Any = load_processor(model)
        config = AutoConfig.from_pretrained(model.path, **_options(model))
        around = (_side(self._processor.tokenizer, config, side) for side in ("start", "end"))
        self.placeholders = Placeholders.of(self._processor.image_token, *around)
        self.feature: int = self._processor.image_token_ids[0]
        """The token that stands for one feature."""
        try:
            probe = self._call([Image.new("RGB", (64, 64))])
        except Exception as error:  # Each processor has its own way not to have what we need.
            raise RLHFError(
                f"the row has images, but the processor of {model.path} cannot say how many tokens "
                f"an image has ({first_line(error)}); choose a model of another family"
            ) from error
        self._types = next((name for name in TYPES if name in probe), None)
        bos = self._processor.tokenizer.bos_token_id
        self.adds_bos = bos is not None and int(probe["input_ids"][0][0]) == bos
        """Whether it puts BOS before a text that does not begin with it."""
        self._rope = _rope(config)
        parts = [self._processor.to_json_string(), config.to_json_string()]
        parts += [metadata.version(name) for name in ("transformers", "pillow", "rlhf-vision")]
        parts.append(type(self._processor.image_processor).__name__)
        if find_spec("torchvision"):
            parts.append(metadata.version("torchvision"))
        parts += [
            path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))
        ]
        self.digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def prepare(self, images: Mapping[str, Image.Image]) -> Prepared:
        """Return images as one prompt's, by the names that errors call them. Raises BadImage for
        one that the processor refuses."""
        try:
            out = self._call([*images.values()])
        except Exception as error:  # Each processor has its own refusals.
            for name, image in images.items() if len(images) > 1 else ():
                self.prepare({name: image})
            name, image = next(iter(images.items()))
            width, height = image.size
            raise BadImage(
                f"{name} of {width} x {height} pixels cannot be prepared for the model "
                f"({first_line(error)}); replace it, {DROP}"
            ) from error
        arrays = {
            name: value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
            for name, value in out.items()
            if name not in NO_IMAGE
        }
        texts = [each["replacement"] for each in out["text_replacement_offsets"][0]]
        return Prepared(texts, arrays)

    def types(self, tokens: Sequence[int]) -> Arrays:
        """Return what kind each token is of [tokens], by the name of the model's argument; nothing
        if the model does not take it."""
        if self._types is None:
            return {}
        return {self._types: self._kinds(tokens)}

    def positions(self, path: Sequence[int], arrays: Arrays) -> NDArray[np.int64] | None:
        """Return the positions [tokens, 3] of a path with the images in `arrays`; None for a model
        whose positions count tokens. Raises RLHFError for images that follow each other without a
        token between them: models take their features for those of one image."""
        if self._rope is None:
            return None
        known = {name: torch.from_numpy(array) for name, array in arrays.items()}
        known["input_ids"] = torch.tensor([list(path)])
        known["mm_token_type_ids"] = torch.from_numpy(self._kinds(path))[None]
        names = inspect.signature(self._rope).parameters
        try:
            positions, _ = self._rope(**{name: known[name] for name in names if name in known})
        except Exception as error:  # Each model has its own way to fail.
            raise RLHFError(
                "the positions of the row's tokens cannot be computed "
                f"({first_line(error)}); write text between its images"
            ) from error
        array: NDArray[np.int64] = positions[:, 0].T.contiguous().numpy()
        return array

    def _kinds(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        kinds = self._processor.create_mm_token_type_ids([list(map(int, tokens))])[0]
        return np.asarray(kinds, np.int64)

    def _call(self, images: Sequence[Image.Image]) -> Any:
        with _one_thread():
            return self._processor(
                text=[self._processor.image_token * len(images)],
                images=[list(images)],
                return_tensors="pt",
                return_text_replacement_offsets=True,
            )


def load_processor(model: ModelConfig) -> Any:
    """Return the processor of a model; without torchvision, without the part for videos."""
    if model.part == "text":
        raise RLHFError("the row has images, but model.part text loads no vision tower; remove it")
    with _without_advice():
        try:
            processor = AutoProcessor.from_pretrained(model.path, **_options(model))
        except Exception as error:  # A damaged folder may raise anything.
            processor = _without_video(model, error)
    if not hasattr(processor, "image_processor") or not hasattr(processor, "image_token"):
        raise RLHFError(
            f"the row has images, but the model in {model.path} reads text only; remove the images "
            "or set model.path to a model that reads them"
        )
    return processor


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from starting threads: a process that is forked later would wait for them, and
    those that prepare images take all cores together."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence what transformers tells authors of processors."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _without_video(model: ModelConfig, error: Exception) -> Any:
    """Return a processor without the part for videos, which needs torchvision. Raises RLHFError if
    that does not help against `error`."""
    makers = {"tokenizer": AutoTokenizer, "image_processor": AutoImageProcessor}
    try:
        kind = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(model.path, **_options(model)))]
        names = kind.get_attributes()
        if find_spec("torchvision") or "video_processor" not in names:
            raise error
        arguments = [
            makers[name].from_pretrained(model.path, **_options(model)) if name in makers else None
            for name in names
        ]
        settings, _ = kind.get_processor_dict(model.path, **_options(model))
        return _images_only(kind).from_args_and_dict(arguments, settings)
    except Exception as reason:  # A damaged folder may raise anything.
        raise RLHFError(
            f"the row has images, but the processor of {model.path} cannot be loaded "
            f"({first_line(reason)}); install torchvision or another package that it names, or "
            "check its files"
        ) from reason


@functools.cache
def _images_only(kind: type[ProcessorMixin]) -> Any:
    """Return the class of a processor whose `video_processor` may be None."""

    class ImagesOnly(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    return ImagesOnly


def _side(tokenizer: Any, config: Any, side: str) -> str:
    """Return the token that chat templates write at one side of an image, the `start` or the `end`;
    empty if the config names none."""
    ids = (getattr(config, f"{kind}_{side}_token_id", None) for kind in ("vision", "image"))
    known = [tokenizer.convert_ids_to_tokens(number) for number in ids if number is not None]
    return next(filter(None, known), "")


def _rope(config: Any) -> Any:
    """Return the method by which a model's class computes positions, which needs only its config;
    None for a class without."""
    kind = AutoModel._model_mapping.get(type(config), None)
    if kind is None or not hasattr(kind, "get_rope_index"):
        return None
    bare = kind.__new__(kind)
    torch.nn.Module.__init__(bare)
    bare.config = config
    return bare.get_rope_index


def _options(model: ModelConfig) -> dict[str, Any]:
    return {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}
