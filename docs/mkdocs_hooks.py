"""What mkdocs calls: pages outside of docs/ belong to the site too, with README.md as its first
page, and the source of every page is beside it, for readers of llms.txt."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "index.md": "README.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "RELEASING.md": "RELEASING.md",
    "benchmarks/RESULTS.md": "benchmarks/RESULTS.md",
    "benchmarks/NOTES.md": "benchmarks/NOTES.md",
}
"""Pages of the site whose files are not in docs/."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/."""
    for page, path in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links for the repository by links for the site, and write the page's source."""
    if page.file.src_uri in OUTSIDE:
        markdown = markdown.replace("](docs/", "](").replace("](../docs/", "](../")
    else:
        markdown = markdown.replace("](../", "](")
    source = Path(config.site_dir) / page.file.src_uri
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(markdown, encoding="utf-8")
    return markdown
