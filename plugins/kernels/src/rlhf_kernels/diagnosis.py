"""What `rlhf doctor` shows of the optional packages."""

from importlib.metadata import PackageNotFoundError, version

from rlhf.hookspecs import Finding

OPTIONAL = {
    "flash": ("flash-attn-4", "long rows on Hopper and later"),
    "fla": ("flash-linear-attention", "Gated DeltaNet, KDA and Mamba 2"),
    "fp8": ("torchao", "model.fp8"),
}
"""Package and feature of each extra."""


def findings() -> list[Finding]:
    """Return one finding for each extra that is not installed."""
    return [
        Finding(
            subject=extra, here=f"{package} is not installed", state="optional", feature=feature,
            remedy=f"pip install 'rlhf-kernels[{extra}]'",
        )
        for extra, (package, feature) in OPTIONAL.items()
        if not _is_installed(package)
    ]  # fmt: skip


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
