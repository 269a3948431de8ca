"""The source of every private name of DeepSpeed that is patched or read, and its digests in the
tested versions.

To add a version: `python patch_sources.py 0.19.9=FOLDER`, with the folder that holds `deepspeed`.
"""

import ast
import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path

from rlhf_plugin_deepspeed.patches.install import path_of
from rlhf_plugin_deepspeed.patches.table import OLDEST, PATCHES, STAGES_1_2, ZERO
from rlhf_plugin_deepspeed.versions import older

DIGESTS = Path(__file__).with_suffix(".json")
"""By target and version; the digest of a value, which has no source, is empty."""
READ = {
    "deepspeed.utils.mixed_precision_linkage:link_hp_params._hp_mapping": OLDEST,
    "deepspeed.runtime.sequence_parallel.ulysses_sp:SequenceTiledCompute.backward."
    "ds_grad_is_ready": OLDEST,
    f"{ZERO}.stage_1_and_2:IPGBucket.copy_streams": "0.19.3",
    f"{STAGES_1_2}._zero_padding": "0.19.7",
}
"""Names inside DeepSpeed that are read and not replaced, as a patch's targets, each with the first
version that has it."""
TARGETS = sorted({*READ, *(target for patch in PATCHES.values() for target in patch.targets)})


def installed() -> Path:
    """Return the folder that holds the installed DeepSpeed."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def find(target: str, root: Path) -> tuple[str, list[str] | None] | None:
    """Return the digest and the parameters of a target in the DeepSpeed under `root`, None where it
    is missing."""
    module, *names = path_of(target)
    path = root.joinpath(*module.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    source, body = text, ast.parse(text).body
    for place, name in enumerate(names):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == name]
        if not found and place == 0:
            for node in (item for item in body if isinstance(item, ast.ImportFrom)):
                imported = {item.name for item in node.names} & {name, "*"}
                known = imported and str(node.module).startswith("deepspeed.")
                if known and (origin := find(f"{node.module}:{name}", root)):
                    return origin
        if not found:
            pattern = rf"\.{name}\b" if place else rf"^{name}\b"
            return ("", None) if re.search(pattern, source, re.MULTILINE) else None
        body, source = found[-1].body, ast.get_source_segment(text, found[-1]) or ""
    function = found[-1]
    assert isinstance(function, ast.FunctionDef)
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    return digest, [item.arg for item in function.args.args if item.arg != "self"]


if __name__ == "__main__":
    digests = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    for version, _, folder in (argument.partition("=") for argument in sys.argv[1:]):
        for target in TARGETS:
            if target.startswith("deepspeed."):
                source = find(target, Path(folder))
                if source is None and older(version, READ.get(target, OLDEST)):
                    continue
                assert source is not None, f"{target} is missing in {version}"
                digests.setdefault(target, {})[version] = source[0]
    DIGESTS.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
