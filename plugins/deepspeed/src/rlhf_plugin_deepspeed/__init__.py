"""The DeepSpeed backend. Its record imports no torch, so a typo in a config is reported at once."""

from rlhf.plugin import ADAMW, BackendPlugin, OptimizerKind
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, check, defaults

plugin = BackendPlugin(
    config=DeepSpeedConfig,
    hooks="rlhf_plugin_deepspeed.backend:DeepSpeedBackend",
    check=check,
    defaults=defaults,
    optimizers=(
        ADAMW,
        OptimizerKind(
            name="lion",
            about="Lion (arXiv 2302.06675), which keeps one state per parameter instead of two; "
            "its paper takes betas 0.9 and 0.99 for its update and its state, and a third to a "
            "tenth of AdamW's rate with 3 to 10 times its weight decay.",
            states=1,
            without=("eps",),
        ),
        OptimizerKind(
            name="muon",
            about="Muon (arXiv 2502.16982) for the matrices of the layers, one state, and AdamW "
            "for all other weights; AdamW's rate and weight decay suit it.",
            layer_states=1,
        ),
        OptimizerKind(
            name="sgd",
            about="gradient descent with momentum, which is the first of betas, also one state.",
            states=1,
            without=("eps",),
        ),
    ),
    tested={
        "stage 0": {"stage": 0},
        "stage 1": {"stage": 1},
        "stage 2": {"stage": 2},
        # Below the threshold, weights stay gathered, and a tiny model would prove nothing.
        "stage 3": {"stage": 3, "persistence_threshold": 0, "frozen": 3},
    },
)
