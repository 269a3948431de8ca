"""The report in a real browser, where there is one (`apt install chromium`)."""

import json
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from rlhf.cli import main

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next((path for path in map(shutil.which, NAMES) if path), None)
POINT = """<script>
const svg = document.querySelector("figure svg"), box = svg.getBoundingClientRect();
const x = LEFT + 0.8 * (WIDTH - LEFT - RIGHT);
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + x * box.width / WIDTH}));
document.querySelectorAll(".chips button")[1].click();
document.body.dataset.wide = document.documentElement.scrollWidth;
</script>"""

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run of 100 steps."""
    folder = tmp_path_factory.mktemp("browser") / "run"
    folder.mkdir()
    lines = [{"step": n, "loss": 4 / n, "grad_norm": 1.0, "epoch": n / 10} for n in range(1, 101)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = folder.parent / "report.html"
    assert main(["report", str(folder), "--output", str(output)]) == 0
    return output


def browse(page: Path, *options: str) -> tuple[str, str]:
    """What the browser prints about a page, and what its console says."""
    command = [str(PROGRAM), "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += ["--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}", *options]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


def test_the_values_under_the_pointer_are_shown_and_metrics_are_chosen(page: Path) -> None:
    pointed = page.with_name("pointed.html")
    pointed.write_text(page.read_text().replace("</body>", f"{POINT}</body>"))
    shown, console = browse(pointed, "--dump-dom", "--window-size=1300,900")
    assert console == ""
    assert '<div class="tip" style="left' in shown
    assert "<div>step 80</div>" in shown
    value = float(shown.split('class="dot"></i>run<b>')[1].split("</b>")[0])
    assert value == pytest.approx(4 / 80, abs=0.01), "as exact as the drawing"
    buttons = [part.split("</button>")[0] for part in shown.split("<button ")[1:]]
    assert buttons == [
        'aria-pressed="true">loss',
        'aria-pressed="false">grad_norm',
        'aria-pressed="false">epoch',
    ]


@pytest.mark.parametrize("width", [500, 1300])
def test_the_page_is_drawn_and_is_not_wider_than_its_window(page: Path, width: int) -> None:
    pointed = page.with_name("pointed.html")
    pointed.write_text(page.read_text().replace("</body>", f"{POINT}</body>"))
    shown, _ = browse(pointed, "--dump-dom", f"--window-size={width},900")
    assert int(shown.split('data-wide="')[1].split('"')[0]) <= width
    picture = page.with_name("page.png")
    browse(page, f"--screenshot={picture}", f"--window-size={width},900")
    content = picture.read_bytes()
    assert struct.unpack(">I", content[16:20]) == (width,)
    assert len(content) > 10_000, "a blank page has some 3 kB"
