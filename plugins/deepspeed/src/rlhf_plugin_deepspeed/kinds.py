"""The optimizers among which `optim.name` chooses."""

from rlhf.plugin import ADAMW, OptimizerKind

OPTIMIZERS = (
    ADAMW,
    OptimizerKind(
        name="lion",
        about="Lion (arXiv 2302.06675), which keeps one state per parameter instead of two; its "
        "paper takes betas 0.9 and 0.99 for its update and its state, and a third to a tenth of "
        "AdamW's rate with 3 to 10 times its weight decay.",
        states=1,
        without=("eps",),
    ),
    OptimizerKind(
        name="muon",
        about="Muon (arXiv 2502.16982) for the matrices of the layers, one state, and AdamW for "
        "all other weights; AdamW's rate and weight decay suit it.",
        layer_states=1,
    ),
    OptimizerKind(
        name="sgd",
        about="gradient descent with momentum, which is the first of betas, also one state.",
        states=1,
        without=("eps",),
    ),
)
TITLES = {"lion": "Lion", "muon": "Muon with AdamW", "sgd": "SGD with momentum"}
"""What plans call them; AdamW has several forms."""
