"""The start-up probe: runs a small batch on each path and takes the best path that is correct."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from rlhf.data.batch import TOKEN_INPUTS, PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.data.packing import Spans, blank_batch, pack, text_after
from rlhf.engine import Engine, Mesh
from rlhf.errors import RLHFError, first_line
from rlhf.model.accelerated import kernels_on
from rlhf.model.finite import check_finite
from rlhf.model.head import Head, LogitForm, logit_form, soft_capped
from rlhf.model.masks import BLOCK
from rlhf.model.packed import PackedModel, PathName, recurrent_layers, takes_our_attention
from rlhf.model.parts import language_model
from rlhf.model.task import label_head
from rlhf.model.unfold import branches_of, inputs_at, num_rows, segments_of

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 8e-2}
"""Largest accepted error of a hidden state, as a share of its norm. A wrong mask gives 0.3 and
more; rounding over some dozens of layers gives about 1e-6, 2e-3 and 2e-2."""

SMALL = 1e-9
"""Smallest norm to divide by."""

FEW = 16
"""Tokens that show what a model does with the products of its head."""

MOST_TOKENS = 8192
"""Length of the probe's longest path; windows wider than this are not tested."""

LONGEST_MATTERS = ("longrope", "dynamic")
"""Kinds of rotary embedding whose frequencies depend on the longest row of a forward."""

WITH_IMAGES = ((6, (11, 8)), (3, (7,)))
"""Tokens of text in the probe's trees with images, as `PackedBatch.spans`."""

OWN_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""What a model's own code may raise."""

ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names of attention dropout in transformers configs; kernels have none."""

ATTENTION_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Names of windows and chunks of attention in transformers configs, in tokens."""


@frozen(kw_only=True)
class AttentionPath:
    """The path on which an engine runs packed batches, and why not a better one."""

    path: PathName
    reason: str
    """Why the better paths were not chosen; empty for `tree`."""
    form: LogitForm = field(factory=LogitForm)
    """What the model does with the products of its head."""

    def __str__(self) -> str:
        """Return one line for the start of the run."""
        what = {
            "tree": "tree: a prompt is computed once for all its answers, no padding",
            "packed": "packed: no padding, every answer with its own copy of the prompt",
            "padded": "padded rows with the model's own attention",
            "separate": "one path at a time with the model's own attention",
        }[self.path]
        return what + (f" ({self.reason})" if self.reason else "")


def choose_path(
    engine: Engine,
    mesh: Mesh,
    *,
    longest: int = MOST_TOKENS,
    known: AttentionPath | None = None,
    image: Example | None = None,
) -> AttentionPath:
    """Set `engine.module.path` to the best path that gives the model's own hidden states, and
    `engine.module.form` to that of its logits. Return both. Collective; all ranks choose the same.

    Compares a small batch of trees with one path at a time, without gradient. The trees are longer
    than the attention window, if `longest` (the longest path in training) is. If the data have
    images, `image` is an example of them: then trees with its images are among the batch, in which
    the model computes its own positions on one path at a time. Raises RLHFError if
    the model's logits are not those of `read_head`. Nothing is compared if the path is `known`,
    from a model that differs only in its weights.
    """
    module = engine.module
    assert isinstance(module, PackedModel)
    engine.eval()
    if known is not None:
        check_finite(module, mesh)
        module.path, module.form = known.path, known.form
        return known
    data = "plain text" if image is None else "images"
    batch = probe_batch(engine, min(longest, MOST_TOKENS), image)
    module.path = "separate"
    with torch.no_grad(), without_cudnn():
        try:
            truth = engine(batch, partial(hidden_and_head_error, module))
        except torch.OutOfMemoryError:
            raise
        except OWN_FAILURES as error:
            raise RLHFError(
                f"{type(module.causal).__name__} fails on {data} in {engine.precision} with "
                f"{type(error).__name__}: {first_line(error)}; choose another model.path"
            ) from error
        worst = max(mesh.gather(float(truth["head_error"])))
        if not math.isfinite(worst):
            check_finite(module, mesh)
            other = "set model.dtype to fp32, or " if engine.precision != "fp32" else ""
            raise RLHFError(
                f"{type(module.causal).__name__} computes NaN or infinity in {engine.precision}, "
                f"although its weights are finite; {other}choose another model.path"
            )
        if not worst <= TOLERANCE[engine.precision]:
            raise RLHFError(
                f"the logits of {type(module.causal).__name__} are not its head's weight, bias, "
                f"scale and soft cap applied to the last hidden states (off by {worst:.1e}), so "
                "this family cannot be trained; choose another model.path"
            )
        choice = first_correct(engine, mesh, batch, truth["hidden"], longest)
    module.path = choice.path
    return evolve(choice, form=module.form)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Run a model's own attention by other kernels than cuDNN's, which builds one for each length,
    in 0.05 s."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def first_correct(
    engine: Engine, mesh: Mesh, batch: PackedBatch, truth: Tensor, longest: int
) -> AttentionPath:
    """Return the best path whose hidden states are those of one path at a time on every rank.
    Collective."""
    module: Any = engine.module
    candidates, reason = candidates_of(module.causal, longest, engine.device)
    recurrent = ", ".join(recurrent_layers(module.causal))
    cause = f"it has recurrent layers ({recurrent}), and " if recurrent else ""
    for path in candidates:
        module.path = path
        # Ranks may differ by rounding or by a compiler. One that tried another path by itself would
        # gather weights at ZeRO-3 that the others do not.
        problems = [problem for problem in mesh.gather(problem_of(engine, batch, truth)) if problem]
        if not problems:
            return AttentionPath(path=path, reason=reason)
        reason = f"{cause}{path} {problems[0]}"
    return AttentionPath(path="separate", reason=reason)


def problem_of(engine: Engine, batch: PackedBatch, truth: Tensor) -> str:
    """Return what is wrong with the module's path on this rank, or ""."""
    try:
        hidden = engine(batch, lambda hidden, *_: {"hidden": hidden})["hidden"]
    except torch.OutOfMemoryError:
        raise
    except OWN_FAILURES as error:
        # On a mask that it does not expect. Then this path is not for the model.
        return f"failed with {type(error).__name__}: {first_line(error)}"
    distance = largest_error(hidden, truth, batch.spans, exact=engine.precision == "fp32")
    return "" if distance <= TOLERANCE[engine.precision] else f"was off by {distance:.1e}"


def candidates_of(
    causal: Any, longest: int, device: torch.device
) -> tuple[tuple[PathName, ...], str]:
    """Return the paths to try before `separate`, and why the others cannot be right."""
    config = causal.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        if rope.get("rope_type") in LONGEST_MATTERS:
            name = "original_max_position_embeddings"
            before = rope.get(name) or getattr(config, name, None) or config.max_position_embeddings
            if longest > before:
                kind = rope["rope_type"]
                return (), f"its {kind} positions depend on the longest row beyond {before} tokens"
    if refusal := takes_our_attention(causal):
        return ("padded",), refusal
    dropout = max(float(getattr(config, name, 0.0) or 0.0) for name in ATTENTION_DROPOUTS)
    if dropout > 0 and kernels_on(device):
        return ("padded",), f"its attention dropout is {dropout}"
    return ("tree", "packed", "padded"), ""


def hidden_and_head_error(
    module: PackedModel, hidden: Tensor, head: Head, batch: PackedBatch
) -> dict[str, Tensor]:
    """Read the hidden states and the model's `form`, and the error of the head's logits at the
    first prompt.

    The error is a share of the norm of the model's own logits; for a classifier, whose few scores
    may be near zero, of the largest norm that they could have.
    """
    prompt = slice(0, batch.spans[0][0])
    tokens = batch.tokens[None, prompt]
    # The head comes first: at ZeRO-3 the model's own forward releases its weight when it ends.
    products = head.logits(hidden[prompt])
    most = head.weight.float().norm() * hidden[prompt].float().norm(dim=-1)
    causal = language_model(module.causal)
    expected = causal(input_ids=tokens, use_cache=False).logits.float()
    if label_head(causal) is None:
        module.form = logit_form(causal, tokens[0, :FEW], hidden[:FEW])
        logits = soft_capped(module.form.scale * products, module.form.softcap)
        error = (logits - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1).clamp_min(SMALL)
    else:
        # A sequence classifier returns only the scores [1, 1] of the last token but padding.
        place = last_token(module.causal, tokens[0]) if expected.dim() == 2 else slice(None)
        error = (products[place] - expected[0]).norm(dim=-1) / most[place].clamp_min(SMALL)
    is_finite = hidden[: batch.num_tokens].isfinite().all()
    return {"hidden": hidden, "head_error": error.max().where(is_finite, torch.inf)}


def last_token(classifier: Any, tokens: Tensor) -> int:
    """Return the index in `tokens` [L] whose score transformers' sequence classifier returns: the
    last token that is not padding."""
    pad = classifier.config.get_text_config().pad_token_id
    real = [place for place, token in enumerate(tokens.tolist()) if token != pad]
    return real[-1] if real else len(tokens) - 1


def largest_error(
    hidden: Tensor, truth: Tensor, spans: Sequence[tuple[int, tuple[int, ...]]], *, exact: bool
) -> float:
    """Return the largest error of hidden states [T, H] over prompts and answers, as a share of the
    norm.

    `exact` takes the worst token of each prompt and answer, else the median one. In 16 bits
    rounding may send a token to another expert, which changes one token; a wrong mask changes most
    tokens of a prompt or answer.
    """
    lengths = [length for prompt, answers in spans for length in (prompt, *answers)]
    # A path that begins with the padding token may have a hidden state of zeros there.
    error = (hidden - truth).float().norm(dim=-1) / truth.float().norm(dim=-1).clamp_min(SMALL)
    parts = error[: sum(lengths)].split(lengths)
    worst = [part.max() if exact else part.median() for part in parts]
    value = float(torch.stack(worst).max())
    return value if value == value else float("inf")


def probe_batch(engine: Engine, longest: int, image: Example | None = None) -> PackedBatch:
    """Return two trees, with two answers and one, the same on every rank. The first tree's answers
    are beyond the attention window. Two more trees have the images of a path of `image`, and those
    twice."""
    module: Any = engine.module
    config = module.causal.config.get_text_config()
    window = max(getattr(config, name, None) or 0 for name in ATTENTION_WINDOWS)
    prompt = max(min(window, longest - 24), 16)
    spans = ((prompt, (24, 17)), (9, (21,)))
    generator = torch.Generator().manual_seed(0)
    used = sum(prompt + sum(answers) for prompt, answers in spans)
    # A compiler takes one block for a size of its own.
    total = max(-(-used // BLOCK), 2) * BLOCK
    tokens = torch.randint(0, config.vocab_size, (total,), generator=generator)
    for placeholder in placeholders(module.causal.config):
        tokens[tokens == placeholder] = 0
    batch = blank_batch(tokens, spans) if image is None else batch_with_images(tokens, spans, image)
    return batch.to(engine.device)


def batch_with_images(tokens: Tensor, spans: Spans, image: Example) -> PackedBatch:
    """Return the trees of `spans`, and two with images, of these `tokens` of text."""
    whole = pack([image], [0])
    path, segments = next(
        pair for pair in zip(branches_of(whole), segments_of(whole), strict=True)
        if num_rows(whole, pair[1])
    )  # fmt: skip
    places = torch.tensor(path)
    own, inputs = whole.tokens[places].tolist(), inputs_at(whole, places, [segments])
    text = cycle(tokens.tolist())
    examples = []
    for copies, (prompt, answers) in zip((0, 0, 1, 2), (*spans, *WITH_IMAGES), strict=True):
        first, *others = ([*islice(text, length)] for length in (prompt, *answers))
        tree_inputs = repeated(inputs, copies, prompt, answers)
        examples.append(Example(own * copies + first, [*map(Answer, others)], inputs=tree_inputs))
    return pack(examples, range(len(examples)), round_to=2 * BLOCK)


def repeated(
    inputs: Mapping[str, Tensor], copies: int, prompt: int, answers: Sequence[int]
) -> dict[str, Tensor]:
    """Return the inputs of a tree whose prompt is `copies` of a path with these inputs, and then
    `prompt` tokens of text."""
    out = {}
    for name, value in inputs.items():
        if name not in TOKEN_INPUTS:
            out[name] = torch.cat([value] * copies) if copies else value[:0]
            continue
        step = int(value.max()) + 1 if name == "position_ids" else 0
        before = [value.numpy() + copy * step for copy in range(copies)] or [value.numpy()[:0]]
        before.append(text_after(before[-1], prompt, name))
        shared = np.concatenate(before)
        parts = [shared, *(text_after(shared, length, name) for length in answers)]
        out[name] = torch.from_numpy(np.concatenate(parts))
    return out


def placeholders(config: Any) -> list[int]:
    """Return the tokens that stand for images and sounds in a model that reads these."""
    kinds = ("image", "video", "audio", "vision")
    return [
        value
        for name, value in vars(config).items()
        if isinstance(value, int) and name.startswith(kinds) and name.endswith(("_id", "_index"))
    ]
