"""Write the pages that say what the code says: `python docs/generate.py`; a test holds them to
it."""

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

from rlhf import hookspecs

FOLDER = Path(__file__).parent


def hooks_page() -> str:
    """hooks.md, from the docstrings of `rlhf.hookspecs`."""
    parts = ["# Hooks", _text(hookspecs.__doc__), "In the order in which a run calls them."]
    for title, specs in (
        ("Backend", hookspecs.BackendHooks),
        ("Observer", hookspecs.ObserverHooks),
    ):
        parts.append(f"## {title} hooks")
        for name, function in vars(specs).items():
            if not name.startswith("_"):
                names = [p for p in inspect.signature(function).parameters if p != "self"]
                parts += [f"### `{name}({', '.join(names)})`", _text(function.__doc__)]
    return "\n\n".join(parts) + "\n"


def configuration_page() -> str:
    """configuration.md, from what `rlhf config sft` prints."""
    command = [sys.executable, "-m", "rlhf", "config", "sft"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"""# Configuration

Every setting has one place, in a YAML file or on the command line; the command line wins:

```bash
rlhf run sft recipe.yaml --optim.lr 1e-5 --model.dtype=bf16
```

A section given as a scalar sets its first field, in YAML and on the command line:
`--model Qwen/Qwen3-8B`, `--data chats.jsonl`, `--lora 16`, `--deepspeed zero3`. Hyphens may stand
for underscores. Unknown names are errors, all told at once with the nearest known one; a name that
TRL, OpenRLHF or Axolotl uses is answered with ours. With LoRA the default learning rate is ten
times the trainer's.

`rlhf config NAME` prints what follows for any installed trainer, with the values in force:

```yaml
{printed.rstrip()}
```
"""


PAGES = {"hooks.md": hooks_page, "configuration.md": configuration_page}


def _text(docstring: str | None) -> str:
    first, _, rest = (docstring or "").partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}".strip()


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
