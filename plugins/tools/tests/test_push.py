"""Which files of a model folder `rlhf push` uploads."""

from pathlib import Path

from rlhf.cli import EXTRA_FILE
from rlhf_tools.push import uploaded_files


def test_only_weights_tokenizer_config_and_card_are_uploaded(tmp_path: Path) -> None:
    kept = ["README.md", "config.json", EXTRA_FILE, "model.safetensors", "tokenizer.json"]
    for name in (*kept, "optimizer.pt", "rows.jsonl", ".env", "extra/notes.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    (tmp_path / "vocab.json").symlink_to("/etc/passwd")
    uploaded = [str(path.relative_to(tmp_path)) for path in uploaded_files(tmp_path)]
    assert sorted(uploaded) == sorted(kept)
