"""Check what `make dist` has built: `python .ci/check_dist.py FOLDER` exits with 1 if a
distribution lacks something that its users see, or has files that do not belong there."""

import sys
import tarfile
import tomllib
from collections.abc import Iterator
from email import message_from_string
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
TOP = {"src", "tests", "README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"}
"""What a source distribution may have in its folder."""


def problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the distributions in a folder."""
    versions = set()
    for project in (ROOT / "core", *sorted(ROOT.glob("plugins/*/"))):
        described = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
        name, version = (described["project"][key] for key in ("name", "version"))
        versions.add(version)
        stem = f"{name.replace('-', '_')}-{version}"
        wheel, source = folder / f"{stem}-py3-none-any.whl", folder / f"{stem}.tar.gz"
        for path in (wheel, source):
            if not path.is_file():
                yield f"{path.name} is missing"
                return
        yield from (f"{wheel.name}: {text}" for text in _of_wheel(wheel, stem, project))
        with tarfile.open(source) as packed:
            tops = {member.name.split("/")[1] for member in packed.getmembers()}
        yield from (f"{source.name}: stray {top}" for top in sorted(tops - TOP))
    if len(versions) > 1:
        yield f"several versions: {', '.join(sorted(versions))}"


def _of_wheel(wheel: Path, stem: str, project: Path) -> Iterator[str]:
    (package,) = (path.parent.name for path in (project / "src").glob("*/__init__.py"))
    with ZipFile(wheel) as packed:
        names = packed.namelist()
        metadata = message_from_string(packed.read(f"{stem}.dist-info/METADATA").decode())
    yield from _of_metadata(metadata, (project / "README.md").read_text(encoding="utf-8"))
    for name in names:
        if name.split("/")[0] not in (package, f"{stem}.dist-info") or "__pycache__" in name:
            yield f"stray {name}"
    if not any(name.endswith("/licenses/LICENSE") for name in names):
        yield "no LICENSE"


def _of_metadata(metadata: Message, readme: str) -> Iterator[str]:
    if str(metadata.get_payload()).strip() != readme.strip():
        yield "its description is not its README"
    for field in ("Summary", "License-Expression", "Requires-Python"):
        if not metadata[field]:
            yield f"no {field}"
    for line in metadata.get_all("Requires-Dist") or ():
        requirement = line.partition(";")[0]
        exact = metadata["Name"] == "rlhf-devkit"  # It imports more than the public modules.
        if requirement.startswith("rlhf-") and "==" in requirement and not exact:
            yield f"{requirement} is not a range"


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1])))
    print("\n".join(found) or "all distributions are complete")
    sys.exit(1 if found else 0)
