"""`rlhf new`: write a distribution with a small plugin that passes its own tests."""

import os
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

from rlhf.errors import RLHFError
from rlhf.folder.disk import new_folder, write_file
from rlhf.plugin import CommandPlugin
from rlhf.registry.installed import installed, known_plugins, name_problem

TEMPLATES = Path(__file__).with_name("templates")
"""One folder for each kind. They are whole distributions whose name is new_name."""
PLAIN = Path(__file__).with_name("plain.py")
"""The backend from which a new one is written."""
KINDS = ("trainer", "backend", "observer", "extension")


def add_arguments(parser: ArgumentParser) -> None:
    """Add kind and name of the plugin, and `--here`."""
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name", metavar="NAME", help="its name, such as my_trainer")
    text = "write one file with a trainer into the current folder"
    parser.add_argument("--here", action="store_true", help=text)


plugin = CommandPlugin(
    help="write a small working plugin with its tests, as a starting point",
    run="rlhf_devkit.new:new_command",
    arguments=add_arguments,
)


def new_command(kind: str, name: str, *, here: bool) -> int:
    """Write the plugin and print what to do with it; returns 0."""
    check_name(kind, name)
    if here and kind != "trainer":
        raise RLHFError(
            f"--here is only for trainers, since rlhf finds {_a(kind)} by the metadata of its "
            "distribution; remove --here"
        )
    folder = Path() if here else Path(f"rlhf-{kind}-{_hyphens(name)}")
    files = {folder / path: text for path, text in _files("here" if here else kind, name)}
    for target in files if here else [folder]:
        if os.access(target, os.F_OK):
            raise RLHFError(f"{target} already exists; choose another name or remove it")
    if here:
        for target, text in files.items():
            write_file(target, text)
    else:
        with new_folder(folder) as part:
            for target, text in files.items():
                file = part / target.relative_to(folder)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    for target in files:
        print(f"wrote {target}")
    if here:
        print(f"run it: rlhf run ./{name}.py:{_camel(name)} --model MODEL --data ROWS.jsonl")
    else:
        print(f"install and test it: pip install -e './{folder}[test]' && pytest {folder}")
    return 0


def check_name(kind: str, name: str) -> None:
    """Raise RLHFError for a name that a plugin of this kind cannot have."""
    if not re.fullmatch(r"[A-Za-z](\w*[A-Za-z0-9])?", name, re.ASCII):
        raise RLHFError(
            f"{name!r} cannot be the name of {_a(kind)}; use letters, digits and underscores, as "
            f"in my_{kind}"
        )
    # An observer's name is not a section, but one rule for all kinds is easier to remember.
    if problem := name_problem("trainer", name):
        raise RLHFError(problem.replace("its name ", "", 1) + "; choose another name")
    owners = {row.name: row.distribution for row in installed() if row.kind == kind}
    if owner := (known_plugins(kind) | owners).get(name):
        raise RLHFError(f"{owner} has {_a(kind)} called '{name}'; choose another name")


def _files(template: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield each file of a template under the new name: its path and its text."""
    folder = TEMPLATES / template
    sources = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    if template == "backend":
        sources["src/rlhf_backend_new_name/backend.py"] = PLAIN
    for path, source in sources.items():
        if "__pycache__" not in path:
            yield _renamed(path, name), _renamed(source.read_text(encoding="utf-8"), name)


def _renamed(text: str, name: str) -> str:
    text = text.replace("Plain", f"{_camel(name)}").replace("plain backend", f"backend {name}")
    for old, new in {"new_name": name, "new-name": _hyphens(name), "NewName": _camel(name)}.items():
        text = text.replace(old, new)
    return text


def _hyphens(name: str) -> str:
    return re.sub("_+", "-", name)


def _camel(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeo' else 'a'} {kind}"
