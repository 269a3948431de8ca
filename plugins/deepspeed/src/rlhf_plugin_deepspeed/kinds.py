"""The optimizers among which `optim.name` chooses."""

from attrs import frozen

from rlhf.plugin import ADAMW, OptimizerKind


@frozen(kw_only=True)
class Optimizer(OptimizerKind):
    """What this backend and its documentation say of an optimizer."""

    title: str = ""
    """What plans call it; AdamW has several forms."""
    note: str
    """What the table in docs/backends.md says of it."""
    step_bytes: int = 0
    """Bytes for each weight that its step takes for a moment, beside the gradients in fp32."""


OPTIMIZERS = (
    Optimizer(
        name=ADAMW.name,
        about=ADAMW.about,
        note="the default; the only one with `optim.states bf16`",
    ),
    Optimizer(
        name="lion",
        title="Lion",
        about="Lion (arXiv 2302.06675), which keeps one state per parameter instead of two; its "
        "paper takes betas 0.9 and 0.99 for its update and its state, and a third to a tenth of "
        "AdamW's rate with 3 to 10 times its weight decay.",
        note="moves each weight by the learning rate, up or down: use a smaller rate",
        states=1,
        step_bytes=4,  # The signs.
        without=("eps",),
    ),
    Optimizer(
        name="muon",
        title="Muon with AdamW",
        about="Muon (arXiv 2502.16982) for the matrices of the layers, one state, and AdamW for "
        "all other weights; AdamW's rate and weight decay suit it.",
        note="[Muon](#muon) for the matrices of the layers, AdamW for the rest",
        layer_states=1,
    ),
    Optimizer(
        name="sgd",
        title="SGD with momentum",
        about="gradient descent with momentum, which is the first of betas, also one state.",
        note="momentum is the first of `optim.betas`; weight decay is decoupled, as AdamW's",
        states=1,
        without=("eps",),
    ),
)
TITLES = {kind.name: kind.title for kind in OPTIMIZERS if kind.title}
STEP_BYTES = {kind.name: kind.step_bytes for kind in OPTIMIZERS}
