"""Write the pages that repeat what the code says: `python docs/generate.py`. A test compares them
with the code."""

import ast
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from rlhf import hookspecs
from rlhf_migrate.foreign import FOREIGN, PROJECTS, Rule
from rlhf_plugin_deepspeed.capabilities import CAPABILITIES
from rlhf_plugin_deepspeed.config import OTHER_NAMES, PRESETS
from rlhf_plugin_deepspeed.kinds import OPTIMIZERS
from rlhf_plugin_deepspeed.patches.install import path_of
from rlhf_plugin_deepspeed.patches.table import PATCHES

FOLDER = Path(__file__).parent
WIDTH = 100
FOR_PLUGINS = (
    *("plugin", "cli", "errors", "trainer", "formats", "scorer", "readouts", "engine", "kernels"),
    *("rollouts", "preview"),
)
LIBRARIES = (
    *("rlhf_rows", "rlhf_demo", "rlhf_distill", "rlhf_rollouts.rewards"),
    *("rlhf_rollouts.reward_models", "rlhf_rollouts.settings", "rlhf_rollouts.on_policy"),
    *("rlhf_rollouts.ratios", "rlhf_devkit"),
)
PUBLIC = ("rlhf", *(f"rlhf.{name}" for name in FOR_PLUGINS), *LIBRARIES)
"""What scripts import, and what plugins may import; `rlhf.hookspecs` has its own page."""
SECTIONS = "rlhf.config.sections"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def hooks_page() -> str:
    """Return hooks.md, from the docstrings of `rlhf.hookspecs`."""
    parts = ["# Hooks", _text(hookspecs.__doc__)]
    hooks = {"Backend": hookspecs.BackendHooks, "Observer": hookspecs.ObserverHooks}
    for title, specs in hooks.items():
        parts += [f"## {title} hooks", _text(specs.__doc__)]
        for hook in (item for item in _definition(specs).body if isinstance(item, Function)):
            del hook.args.args[0]  # self
            names = [parameter.arg for parameter in hook.args.args]
            parts += [f"### `{hook.name}({', '.join(names)})`", *_function(hook, "")]
    others = {*_public_names(hookspecs)} - {specs.__name__ for specs in hooks.values()}
    parts.append("## What hooks take and return")
    for name in sorted(others, key=str.lower):
        parts += _entry(hookspecs, name)
    return "\n\n".join(filter(None, parts)) + "\n"


def configuration_page() -> str:
    """Return configuration.md, from what `rlhf config sft` prints."""
    command = [sys.executable, "-m", "rlhf", "config", "sft"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"""# Configuration

Settings come from a YAML file and from the command line. If both set the same value, the command
line wins:

```bash
rlhf run sft recipe.yaml --optim.lr 1e-5 --model.dtype=bf16
```

A scalar for a whole section sets its first field, in YAML and on the command line:
`--model Qwen/Qwen3-8B`, `--data chats.jsonl`, `--lora 16`, `--deepspeed zero3`. In names, a hyphen
may replace an underscore.

All unknown names are reported together, with the most similar known names. For a name from TRL,
Axolotl, LLaMA-Factory or OpenRLHF, the error gives the name used here, and
[`rlhf migrate`](migrate.md) translates a whole file.

`rlhf config NAME` prints every setting of an installed trainer, with its meaning and its value.
This is the output of `rlhf config sft`:

```yaml
{printed.rstrip()}
```
"""


def backends_page() -> str:
    """Return backends.md with its tables of DeepSpeed's presets, capabilities, optimizers and
    patches."""
    parts = {
        "presets": _presets(),
        "capabilities": _capabilities(),
        "optimizers": _optimizers(),
        "patches": _patches(),
    }
    return _filled("backends.md", parts)


def migrate_page() -> str:
    """Return migrate.md with a table of the keys and a table of the defaults of each project."""
    return _filled("migrate.md", {"migrate": "\n".join(_projects())})


def _filled(name: str, parts: dict[str, str]) -> str:
    """Return a page with the text between its marks `<!-- part -->` replaced."""
    page = (FOLDER / name).read_text()
    for part, text in parts.items():
        start, end = f"<!-- {part} -->\n", f"<!-- end of {part} -->"
        before, _, rest = page.partition(start)
        page = before + start + text + end + rest.partition(end)[2]
    return page


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _projects() -> Iterator[str]:
    for project in PROJECTS.values():
        yield f"### {project.title}\n"
        groups = {"": project.keys} | {
            name: variant.keys for name, variant in project.variants.items()
        }
        groups["a data set"] = project.data_set
        rows = (
            (
                name or "all",
                f"`{key}`",
                _counterpart(rule, names_trainer=key in project.chosen_by),
                _remark(rule),
            )
            for name, keys in groups.items()
            for key, rule in keys.items()
            if rule.kind != "unneeded" or rule.note
        )
        yield _table(("trainer", "key", "here", "remark"), rows)
        defaults = (
            (f"`{name}`", f"`{variant.trainer}`", _values(project.defaults | variant.defaults))
            for name, variant in project.variants.items()
        )
        yield _table(("trainer", "here", "defaults that are written"), defaults)


def foreign_names() -> str:
    """Return the list of names by which core recognises settings of other projects."""
    return "".join(f"{name} {ours}\n" for name, ours in FOREIGN.items())


def _counterpart(rule: Rule, *, names_trainer: bool) -> str:
    """Return what a key is here: a setting in code, or words."""
    if names_trainer:
        return "the trainer"
    if rule.kind == "lost":
        return "-"
    if rule.kind == "factor":
        return "a factor of `batch.size`"
    return f"`{rule.ours}`" if re.fullmatch(r"[a-z_.]+", rule.ours) else rule.ours


def _remark(rule: Rule) -> str:
    """Return what differs, and our values where they are called otherwise."""
    pairs = (rule.values or {}).items()
    if pairs and not rule.ours:
        only = ", ".join(f"`{theirs}`" for theirs, ours in pairs if ours == {})
        return "; ".join(filter(None, (f"behaves as {only}", rule.note)))
    changed = [
        f"`{theirs}`: {_values(ours) if isinstance(ours, dict) else f'`{ours}`'}"
        for theirs, ours in pairs
        if ours not in (theirs, {})
    ]
    return "; ".join(filter(None, (", ".join(changed), rule.note)))


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}` {value}" for name, value in values.items())


def api_page() -> str:
    """Return api.md: names, signatures, fields and docstrings of the public modules."""
    parts = [
        "# API",
        "What scripts import from `rlhf`, and the modules that plugins may import. A name, a "
        "signature or a\nfield on this page changes only with a new minor version of rlhf-core. "
        "The hooks are in\n[hooks.md](hooks.md).",
    ]
    for name in PUBLIC:
        module = importlib.import_module(name)
        parts += [f"## {name}", _text(module.__doc__)]
        for public in _public_names(module):
            parts += _entry(module, public)
    return "\n\n".join(filter(None, parts)) + "\n"


def llms_page() -> str:
    """Return llms.txt (https://llmstxt.org), the pages of the site with what each is about."""
    site = yaml.safe_load((FOLDER.parent / "mkdocs.yml").read_text())
    parts = [f"# {site['site_name']}", f"> {site['site_description']}"]
    for section in site["nav"]:
        for title, pages in section.items():
            parts += [f"## {title}", "\n".join(map(_link, _leaves(pages)))]
    return "\n\n".join(parts) + "\n"


def _leaves(pages: Any) -> Iterator[str]:
    """Yield the pages of a part of the site."""
    if isinstance(pages, str):
        yield pages
    else:
        for titles in pages:
            for page in titles.values():
                yield from _leaves(page)


def _link(page: str) -> str:
    """Return a list entry with the page's heading and its first sentence outside of code."""
    outside = {"index.md": "README.md"}.get(page, page)
    path = next(path for path in (FOLDER / page, FOLDER.parent / outside) if path.exists())
    heading, *texts = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL).split("\n\n")
    text = next(text for text in map(str.strip, texts) if text and text[0] not in "#|<-")
    sentence = re.split(r"(?<=\.)\s", " ".join(text.split()))[0].rstrip(":")
    return f"- [{heading.removeprefix('# ').strip()}]({page}): {sentence}"


PAGES = {
    "hooks.md": hooks_page,
    "configuration.md": configuration_page,
    "backends.md": backends_page,
    "migrate.md": migrate_page,
    "../core/src/rlhf/config/foreign_names.txt": foreign_names,
    "api.md": api_page,
    "llms.txt": llms_page,
}


def _presets() -> str:
    rows = []
    for name, preset in PRESETS.items():
        names = [name, *(other for other, same in OTHER_NAMES.items() if same == name)]
        places = (preset.offload_optimizer, preset.offload_param)
        on = ["CPU" if is_on else "accelerator" for is_on in places]
        rows.append(
            (", ".join(f"`{each}`" for each in names), str(preset.stage), *on, preset.reason)
        )
    return _table(("preset", "stage", "optimizer", "weights", "choose it where"), rows)


def _capabilities() -> str:
    rows = (
        (
            row.feature,
            " with ".join(f"`{name}`" for name in (row.setting, row.needs) if name),
            f">= {row.least}",
            ", ".join(map(str, row.stages)),
            ", ".join(row.precisions),
            ", ".join(f"`{name}`" for name in row.excludes),
        )
        for row in CAPABILITIES
    )
    return _table(("feature", "setting", "DeepSpeed", "stages", "precisions", "not with"), rows)


def _optimizers() -> str:
    rows = []
    for kind in OPTIMIZERS:
        states = str(kind.states)
        if kind.layer_states is not None:
            states = f"{kind.layer_states}, of some weights {states}"
        rows.append((f"`{kind.name}`", states, kind.note))
    return _table(("`optim.name`", "states per parameter", "notes"), rows)


def _short(target: str) -> str:
    """Return a patch's target without packages, and without the module of a class."""
    module, *names = path_of(target)
    return ".".join(names if len(names) > 1 else [module.rpartition(".")[2], *names])


def _patches() -> str:
    rows = (
        (
            f"`{name}`",
            ", ".join(map(str, patch.stages)),
            patch.kind,
            patch.reason,
            patch.gain,
            ", ".join(f"`{_short(target)}`" for target in patch.targets),
        )
        for name, patch in PATCHES.items()
    )
    return _table(("patch", "stages", "kind", "reason", "gain", "targets"), rows)


def _public_names(module: ModuleType) -> list[str]:
    """Return `__all__`, or the functions and classes that the module defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__, key=str.lower)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _entry(module: ModuleType, name: str) -> Iterator[str]:
    """Yield the paragraphs about one public name."""
    yield f"### {name}"
    value = inspect.unwrap(getattr(module, name))
    node = _definition(value)
    if getattr(value, "__module__", None) == SECTIONS:
        yield f"{_text(value.__doc__)}\nIts fields are in [configuration.md](configuration.md)."
    elif isinstance(node, ast.ClassDef):
        yield from _class(node)
    elif node is not None:
        yield from _function(node, "")
    else:
        yield from _constant(module, name)


def _constant(module: ModuleType, name: str) -> Iterator[str]:
    """Yield the definition and the docstring of a constant or a type alias."""
    body = ast.parse(inspect.getsource(module)).body
    for item, below in itertools.pairwise(body):
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == name:
            yield _block(ast.unparse(item))
            match below:
                case ast.Expr(ast.Constant(str(text))):
                    yield _text(text)
            return
        if isinstance(item, ast.ImportFrom) and name in {each.name for each in item.names}:
            yield from _constant(importlib.import_module(str(item.module)), name)
            return


def _definition(value: Any) -> ast.ClassDef | Function | None:
    """Return the parsed source of a class or function."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return None
    module = ast.parse(inspect.getsource(sys.modules[value.__module__]))
    nodes = (node for node in module.body if getattr(node, "name", None) == value.__name__)
    return next(nodes, None)  # type: ignore[return-value]


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    yield _block(f"class {node.name}{bases}")
    yield _text(ast.get_docstring(node))
    if fields := list(_fields(node)):
        yield "\n".join(fields)
    for item in node.body:
        if isinstance(item, Function) and _is_public(item):
            yield from _function(item, f"{node.name}.")


def _is_public(node: Function) -> bool:
    """Return whether a method belongs on the page: `__init__` does if it takes arguments."""
    takes = len(node.args.args + node.args.kwonlyargs) > 1
    return node.name[0] != "_" or node.name == "__call__" or (node.name == "__init__" and takes)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield a list entry for each annotated name of a class, with its default and docstring."""
    for item, below in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign):
            continue
        text = f"- `{ast.unparse(item.target)}: {ast.unparse(item.annotation)}`"
        if (default := _default(item.value)) is not None:
            text += f", default `{default}`"
        match below:
            case ast.Expr(ast.Constant(str(doc))):
                text += f": {' '.join(doc.split())}"
        yield textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False)


def _default(value: ast.expr | None) -> str | None:
    """Return the source of a field's default, also that of `attrs.field`."""
    match value:
        case None:
            return None
        case ast.Call(ast.Name("field"), _, keywords):
            arguments = {keyword.arg: keyword.value for keyword in keywords}
            if "factory" in arguments:
                return f"{ast.unparse(arguments['factory'])}()"
            return ast.unparse(arguments["default"]) if "default" in arguments else None
    return ast.unparse(value)


def _function(node: Function, owner: str) -> Iterator[str]:
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if any(isinstance(item, ast.Name) and item.id == "property" for item in node.decorator_list):
        yield _block(f"{owner}{node.name}: {result.removeprefix(' -> ')}")
    else:
        yield _block(_call(node, owner, result))
    yield _text(ast.get_docstring(node))


def _call(node: Function, owner: str, result: str) -> str:
    """Return the call of a function as one line, or as one line for each parameter."""
    line = f"{owner}{node.name}({ast.unparse(node.args)}){result}"
    if len(line) > WIDTH:
        parts = ",\n".join(textwrap.indent(part, "    ") for part in _parameters(node.args))
        line = f"{owner}{node.name}(\n{parts},\n){result}"
    return line


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    """Yield the source of each parameter."""
    names = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(names) - len(arguments.defaults)) + list(arguments.defaults)
    yield from map(_parameter, names, defaults)
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    yield from map(_parameter, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _parameter(name: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(name) + (f"={ast.unparse(default)}" if default else "")


def _block(text: str) -> str:
    return f"```\n{text}\n```"


def _text(docstring: str | None) -> str:
    first, _, rest = (docstring or "").partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}".strip()


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
