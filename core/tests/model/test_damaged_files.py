"""Files of a model folder that git-lfs has not fetched, or that are empty or cut off, are named
with what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_models import config_of, empty, load
from transformers import AutoModelForCausalLM

from rlhf.commands.merge import merge_command
from rlhf.config.sections import LoraConfig
from rlhf.errors import RLHFError
from rlhf.model.exported import exported_model, exported_tokenizer
from rlhf.model.extra import exported_extra, save_extra
from rlhf.model.stored import damage
from rlhf.model.tokenizer import load_tokenizer
from rlhf.scorer import open_scorer
from rlhf_devkit import make_model

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    f"oid sha256:{'0' * 64}\n"
    "size 12345\n"
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def in_shards(folder: Path) -> None:
    causal = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    causal.save_pretrained(folder, max_shard_size="20KB")


def in_torch_s_format(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def with_old_tokenizer(folder: Path) -> None:
    """Replace tokenizer.json by the files of an older transformers."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(each) for each in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (folder / "added_tokens.json").write_text("{}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "GPT2Tokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def as_it_is(folder: Path) -> None:
    pass


CASES = [
    (as_it_is, "config.json", empty),
    (as_it_is, "generation_config.json", empty),
    (as_it_is, "model.safetensors", load),
    (in_shards, "model-00002-of-0000?.safetensors", load),
    (in_shards, "model.safetensors.index.json", load),
    (in_torch_s_format, "pytorch_model.bin", load),
    (as_it_is, "tokenizer.json", load_tokenizer),
    (as_it_is, "tokenizer_config.json", load_tokenizer),
    (as_it_is, "chat_template.jinja", load_tokenizer),
    (with_old_tokenizer, "vocab.json", load_tokenizer),
    (with_old_tokenizer, "merges.txt", load_tokenizer),
    (with_old_tokenizer, "added_tokens.json", load_tokenizer),
    (as_it_is, "config.json", load_tokenizer),
    (as_it_is, "config.json", lambda config: exported_model(config.model.path, "causal")),
    (as_it_is, "model.safetensors", lambda config: exported_model(config.model.path, "causal")),
    (as_it_is, "tokenizer.json", lambda config: exported_tokenizer(config.model.path)),
    (as_it_is, "chat_template.jinja", lambda config: exported_tokenizer(config.model.path)),
]


@pytest.mark.parametrize("content", ["pointer", "empty", "cut"])
@pytest.mark.parametrize(("prepare", "name", "read"), CASES)
def test_a_damaged_file_is_named_with_the_remedy(
    prepare: Callable[[Path], None], name: str, read: Any, content: str, folder: Path
) -> None:
    prepare(folder)
    read(config_of(str(folder)))
    (file,) = folder.glob(name)
    if content == "cut" and file.suffix in (".jinja", ".txt"):
        pytest.skip("a shorter text is a text")
    cut = file.read_bytes()[: file.stat().st_size // 2]
    file.write_bytes({"pointer": POINTER.encode(), "empty": b"", "cut": cut}[content])
    with pytest.raises(RLHFError) as error:
        read(config_of(str(folder)))
    problem, remedy = str(error.value).removeprefix(f"{file} ").split("; ")
    if content == "pointer":
        assert problem == "is a git-lfs pointer, not the file itself"
        assert remedy == f"run git lfs pull in {folder}"
    else:
        assert problem.startswith("is truncated" if content == "cut" else "is empty")
        assert remedy == "download it again"


def test_a_safetensors_file_that_ends_early_has_its_size_in_the_error(folder: Path) -> None:
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 10)
    assert damage(file) == (
        f"is truncated: it has {size - 10:,} of {size:,} bytes; download it again"
    )


def test_files_that_are_not_read_may_be_pointers(folder: Path) -> None:
    for name in ("pytorch_model.bin", "tf_model.h5", "tokenizer.model", "original.json"):
        (folder / name).write_text(POINTER)
    load_tokenizer(config_of(str(folder)))
    load(config_of(str(folder)))


def test_a_pointer_in_place_of_the_config_of_a_scorer_is_named(folder: Path) -> None:
    (folder / "config.json").write_text(POINTER)
    with pytest.raises(RLHFError) as error:
        open_scorer(folder, device="cpu", dtype="fp32")
    assert str(error.value) == (
        f"{folder}/config.json is a git-lfs pointer, not the file itself; run git lfs pull in "
        f"{folder}"
    )


def test_a_pointer_is_not_copied_into_a_merged_model(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    module = load(config_of(str(folder), lora=LoraConfig(rank=2)))
    module.save_weights(module.state_dict(), adapter)
    (adapter / "generation_config.json").write_text(POINTER)
    with pytest.raises(RLHFError, match=r"generation_config\.json is a git-lfs pointer, not the"):
        merge_command(str(adapter), str(tmp_path / "merged"))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pointer_in_an_adapter_folder_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    module = load(config_of(str(folder), lora=LoraConfig(rank=2)))
    module.save_weights(module.state_dict(), adapter)
    (adapter / name).write_text(POINTER)
    for read in (
        lambda: load(config_of(str(folder), model={"adapter": str(adapter)})),
        lambda: exported_model(adapter, "causal"),
    ):
        with pytest.raises(RLHFError) as error:
            read()
        assert str(error.value) == (
            f"{adapter}/{name} is a git-lfs pointer, not the file itself; run git lfs pull in "
            f"{adapter}"
        )


def test_a_pointer_in_place_of_a_trainer_s_own_parameters_is_named(tmp_path: Path) -> None:
    save_extra({"scale": torch.ones(1)}, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "extra" / "parameters.safetensors"
    file.write_text(POINTER)
    with pytest.raises(RLHFError) as error:
        exported_extra(tmp_path)
    assert str(error.value) == (
        f"{file} is a git-lfs pointer, not the file itself; run git lfs pull in {file.parent}"
    )
