"""The distribution that docs/guide.md builds."""

import re
import tomllib
from pathlib import Path

import rlhf_demo
from rlhf_devkit import write_rows

PAGE = Path(__file__).parents[1] / "docs" / "guide.md"
RATINGS = [
    {
        "prompt": row["messages"][0]["content"],
        "answer": row["messages"][1]["content"],
        "rating": 1 + number % 5,
    }
    for number, row in enumerate(rlhf_demo.rows("arithmetic", "train", "demonstration")[:29])
]


def install_guide(site: Path) -> None:
    """Write the files of the page into a folder of sys.path as an installed distribution, and
    ratings.jsonl."""
    text = PAGE.read_text()
    for name, code in re.findall(r"`([\w/]+\.py)`[^`]*\n\n```python\n(.*?)^```", text, re.S | re.M):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(code)
    project = tomllib.loads(re.search(r"^```toml\n(.*?)^```", text, re.S | re.M)[1])["project"]  # type: ignore[index]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    entries = project["entry-points"]["rlhf.trainers"]
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[rlhf.trainers]\n{lines}")
    write_rows(site / "ratings.jsonl", RATINGS)
