"""The divergences of a student's distribution q from its teacher's p, as skewed KL divergences."""

from rlhf_distill import SkewedKL


def measure(loss: str, *, beta: float, skew: float) -> SkewedKL:
    """Return the divergence by its name in the configuration.

    forward_kl: the student covers all that the teacher does (Hinton et al., arXiv 1503.02531, up to
    the teacher's entropy). reverse_kl: the student seeks the teacher's modes (MiniLLM, arXiv
    2306.08543, here per token). jsd (GKD, arXiv 2306.13649, equation 1): divided by beta it goes to
    KL(p || q) as beta goes to 0, divided by 1 - beta to KL(q || p) as beta goes to 1. The skewed
    KLs are those of DistiLLM (arXiv 2402.03898; its authors' code leaves out the teacher's entropy,
    which has no gradient).
    """
    shares = {
        "forward_kl": {"forward": 1.0},
        "reverse_kl": {"reverse": 1.0},
        "jsd": {
            "forward": beta, "forward_skew": beta, "reverse": 1 - beta, "reverse_skew": 1 - beta,
        },
        "skewed_forward_kl": {"forward": 1.0, "forward_skew": skew},
        "skewed_reverse_kl": {"reverse": 1.0, "reverse_skew": skew},
    }  # fmt: skip
    return SkewedKL(**shares[loss])
