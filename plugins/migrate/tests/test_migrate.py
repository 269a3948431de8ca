"""`rlhf migrate`: files of TRL, Axolotl, LLaMA-Factory and OpenRLHF as configurations of ours. The
examples are written here in each project's format."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from rlhf import read_config
from rlhf.cli import main, setting_name
from rlhf.errors import RLHFError
from rlhf_migrate.arguments import Arguments, read_arguments
from rlhf_migrate.foreign import FOREIGN, PROJECTS
from rlhf_migrate.rules import Migration
from rlhf_migrate.translate import translate

TRL_SCRIPT = """#!/bin/bash
MODEL=org/model
# trl sft is not called here
accelerate launch --config_file=gpus.yaml --num_processes 4 trl/scripts/dpo.py \\
    --model_name_or_path $MODEL --dataset_name org/pairs --learning_rate 5.0e-7 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --gradient_checkpointing \\
    --loss_type sigmoid bco_pair --loss_weights 0.8 0.2 --eval_strategy steps --eval_steps 50 \\
    --no_remove_unused_columns --neftune_noise_alpha 5
"""
AXOLOTL = """
base_model: org/model
datasets:
  - {path: org/chats, type: chat_template, split: 'train[:10%]', field_messages: dialogue}
  - {path: json, type: alpaca, data_files: rows.jsonl}
val_set_size: 0.05
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
peft_use_dora: true
lora_modules_to_save: [embed_tokens, lm_head]
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: paged_adamw_8bit
learning_rate: 2e-4
wandb_project:
flash_attention: true
"""
LLAMA_FACTORY = """
stage: dpo
model_name_or_path: org/model
finetuning_type: lora
use_dora: true
use_muon: true
additional_target: embed_tokens,lm_head
dataset: pairs, others
template: llama3
cutoff_len: 1024
pref_ftx: 0.1
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 5.0e-7}
num_train_epochs: 3.0
warmup_ratio: 0.1
bf16: true
deepspeed: ds.json
"""
OPENRLHF = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --pretrain org/model --dataset org/chats@data,rows.jsonl --input_key question \\
   --output_key answer --train_batch_size 256 --micro_train_batch_size 2 --max_len 4096 \\
   --packing_samples --zero_stage 3 --adam_offload --lora_rank 64 --save_steps -1 \\
   --ring_attn_size 2 \\
   --input_template $'Question: {}'
EOF
deepspeed --module $training_commands
"""


def migrated(path: Path, text: str, *words: str) -> tuple[dict[str, Any], str]:
    """The YAML that `rlhf migrate` writes for a file with this text: parsed, and its comments."""
    path.write_text(text)
    output = path.with_name("ours.yaml")
    assert main(["migrate", str(path), "-o", str(output), *words]) == 0
    written = output.read_text()
    return yaml.safe_load(written), written


def test_a_command_line_of_trl_becomes_our_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "dpo.sh"
    ours, text = migrated(script, TRL_SCRIPT)
    assert capsys.readouterr().err == (
        f"{script} is TRL's dpo: `rlhf run dpo` accepts it; `rlhf inspect dpo` shows its rows\n"
    )
    assert ours["model"] == {"path": "org/model", "dtype": "bf16"}
    assert ours["data"] == {
        "train": ["org/pairs"],
        "eval": [{"path": "org/pairs", "split": "test"}],
        "max_tokens": 1024,
        "too_long": "cut",
    }
    assert ours["batch"] == {"size": 64}
    assert ours["optim"] == {
        "lr": 5e-7, "schedule": "linear", "warmup": 0, "weight_decay": 0.0, "clip": 1.0,
        "betas": [0.9, 0.999], "eps": 1e-8,
    }  # fmt: skip
    assert ours["train"] == {"epochs": 3, "seed": 42, "eval_every": 50}
    assert ours["dpo"]["loss"] == [
        {"name": "sigmoid", "weight": 0.8},
        {"name": "bco_pair", "weight": 0.2},
    ]
    assert "size: 64  # per_device_train_batch_size 2 x gradient_accumulation_steps 8 x 4" in text
    assert "# Changes what is learned, and is left out:\n# - neftune_noise_alpha 5" in text
    assert "# Not needed here: gradient_checkpointing, remove_unused_columns\n" in text
    assert "  seed: 42        # default of TRL\n" in text
    assert "lora" not in ours


def test_an_adapter_of_trl_becomes_ours_if_it_is_switched_on(tmp_path: Path) -> None:
    words = "trl sft --model_name_or_path org/model --dataset_name org/chats --lora_r 16 --use_dora"
    more = " --use_rslora --lora_modules_to_save embed_tokens lm_head --lora_target_modules o_proj"
    ours, text = migrated(tmp_path / "sft.sh", f"{words}{more} --use_peft")
    assert ours["lora"] == {
        "rank": 16, "alpha": 32, "dropout": 0.05, "targets": "o_proj", "rslora": True,
        "dora": True, "modules_to_save": ["embed_tokens", "lm_head"],
    }  # fmt: skip
    assert "# use_dora\n" in text
    config = read_config("sft", file=tmp_path / "ours.yaml")
    assert config.lora is not None
    assert config.lora.dora
    (tmp_path / "ours.yaml").unlink()
    assert "lora" not in migrated(tmp_path / "sft.sh", words)[0]


def test_a_yaml_of_axolotl_becomes_our_configuration(tmp_path: Path) -> None:
    ours, text = migrated(tmp_path / "qlora.yaml", AXOLOTL, "--gpus", "2")
    assert text.startswith("# Axolotl's sft, from qlora.yaml, for `rlhf run sft`.\n")
    assert ours["data"]["train"] == [
        {"path": "org/chats", "split": "train[:10%]", "columns": {"messages": "dialogue"}},
        "rows.jsonl",
    ]
    assert ours["data"]["too_long"] == "drop"
    assert ours["model"]["quantize"] == "nf4"
    assert ours["lora"] == {
        "rank": 32, "alpha": 16, "dropout": 0.0, "targets": "all-linear", "dora": True,
        "modules_to_save": ["embed_tokens", "lm_head"],
    }  # fmt: skip
    assert (ours["batch"]["size"], ours["optim"]["lr"]) == (16, 2e-4)
    assert (ours["optim"]["schedule"], ours["optim"]["warmup"]) == ("cosine", 0.03)
    assert "- optimizer paged_adamw_8bit: AdamW with 32-bit states is used here" in text
    assert "- val_set_size 0.05: rows are not split here; put held-out rows into a file" in text
    assert "- sample_packing true: packing is always on here. There, a batch counts" in text


def test_a_key_of_the_file_has_precedence_over_the_default_of_another(tmp_path: Path) -> None:
    renamed = (
        AXOLOTL.replace("num_epochs", "num_train_epochs")
        + "lr_scheduler_type: linear\nnum_epochs:\n"
    )
    ours, _ = migrated(tmp_path / "qlora.yaml", renamed)
    assert (ours["train"]["epochs"], ours["optim"]["schedule"]) == (2, "linear")


def test_a_yaml_of_llama_factory_becomes_our_configuration(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    columns = {"prompt": "question", "images": "pictures"}
    about = {"pairs": {"file_name": "p.json", "ranking": True, "columns": columns}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(about))
    stages = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "ds.json").write_text(json.dumps(stages))
    ours, text = migrated(tmp_path / "dpo.yaml", LLAMA_FACTORY)
    assert ours["data"]["train"] == [
        {
            "path": str(tmp_path / "data" / "p.json"),
            "columns": {"instruction": "question", "images": "pictures"},
        },
        "others",
    ]
    assert ours["lora"] == {
        "rank": 8, "dropout": 0.0, "targets": "all-linear", "dora": True,
        "modules_to_save": ["embed_tokens", "lm_head"],
    }  # fmt: skip
    assert ours["dpo"] == {"loss": ["sigmoid", {"name": "sft", "weight": 0.1}], "beta": 0.1}
    assert ours["deepspeed"] == {"stage": 2, "offload_optimizer": True}
    assert ours["optim"]["min_lr"] == pytest.approx(0.1)
    assert ours["optim"]["name"] == "muon"
    assert ours["train"]["epochs"] == 3
    assert "- batch.size: per_device_train_batch_size 1 x gradient_accumulation_steps 8" in text
    assert "- dataset others: is not in a dataset_info.json that was found" in text
    assert "- template llama3: the tokenizer's own chat template is used here" in text


def test_settings_of_images_are_reported(tmp_path: Path) -> None:
    _, text = migrated(
        tmp_path / "sft.yaml",
        "stage: sft\nmodel_name_or_path: org/model\nfinetuning_type: full\ndataset: others\n"
        "freeze_vision_tower: false\nfreeze_multi_modal_projector: false\nmedia_dir: pictures\n"
        "image_max_pixels: 262144\n",
    )
    for line in (
        "freeze_vision_tower false: set model.train to [language, projector, vision]",
        "media_dir pictures: relative paths of images begin at the folder of the data file",
        "image_max_pixels 262144: the processor resizes images; set its sizes in a copy of the "
        "model's folder",
    ):
        assert f"- {line}" in " ".join(text.replace("#", "").split())
    assert "freeze_multi_modal_projector" not in text
    other = tmp_path / "other"
    other.mkdir()
    _, text = migrated(
        other / "lora.yaml",
        "base_model: org/model\nadapter: lora\nprocessor_type: AutoProcessor\n"
        "freeze_mm_modules: true\ndatasets: [{path: rows.jsonl, type: chat_template}]\n",
    )
    assert "- freeze_mm_modules true: set model.train to [language], if the rows have" in text
    assert "does not know" not in text


def test_models_that_openrlhf_offloads_are_offloaded(tmp_path: Path) -> None:
    more = "--ref_offload --zpg 8 --zero_stage 3"
    ours, _ = migrated(tmp_path / "sft.sh", OPENRLHF.replace("--zero_stage 3", more))
    assert ours["deepspeed"]["frozen"] == "offload"
    assert ours["deepspeed"]["hpz_partition_size"] == 8


def test_a_script_of_openrlhf_becomes_our_configuration(tmp_path: Path) -> None:
    ours, text = migrated(tmp_path / "sft.sh", OPENRLHF)
    columns = {"prompt": "question", "completion": "answer"}
    assert ours["data"]["train"] == [
        {"path": "org/chats", "columns": columns},
        {"path": "rows.jsonl", "columns": columns},
    ]
    assert ours["batch"] == {"size": 256}
    assert ours["optim"]["betas"] == [0.9, 0.95]
    assert ours["optim"]["min_lr"] == 0.1
    assert ours["train"]["epochs"] == 2
    assert ours["checkpoint"] == {"every": None}
    assert ours["lora"]["rank"] == 64
    assert ours["deepspeed"] == {
        "stage": 3, "sequence_parallel": 2, "offload_optimizer": True,
    }  # fmt: skip
    assert "- input_template 'Question: {}': prompts are used as they are" in text
    tensor = OPENRLHF.replace("--ring_attn_size", "--ds_tensor_parallel_size")
    (tmp_path / "ours.yaml").unlink()
    ours, _ = migrated(tmp_path / "tensor.sh", tensor.replace("--zero_stage 3", "--zero_stage 2"))
    assert ours["deepspeed"]["tensor_parallel"] == 2


@pytest.mark.parametrize(
    ("project", "variant"),
    [(name, each) for name, project in PROJECTS.items() for each in project.variants],
)
def test_each_trainer_of_each_project_has_settings_that_our_reader_accepts(
    project: str, variant: str, tmp_path: Path
) -> None:
    rules = {**PROJECTS[project].keys, **PROJECTS[project].variants[variant].keys}
    model = next(key for key, rule in rules.items() if rule.ours == "model.path")
    file = tmp_path / "theirs.yaml"
    rows = {"datasets": [{"path": "a.jsonl"}], "dataset_name": "a.jsonl", "dataset": "a.jsonl"}
    keys = {key: value for key, value in rows.items() if key in rules} | {model: "org/model"}
    for teacher in ("teacher_model_name_or_path", "teacher_model"):
        keys |= {teacher: "org/teacher"} if teacher in rules else {}
    file.write_text(yaml.safe_dump(keys))
    ours, text = migrated(file, file.read_text(), "--from", f"{project}/{variant}")
    trainer = PROJECTS[project].variants[variant].trainer
    config = read_config(trainer, file=tmp_path / "ours.yaml")
    assert config.optim.lr == float(ours["optim"]["lr"])
    assert {"lr", "schedule", "warmup", "weight_decay", "clip", "betas"} <= ours["optim"].keys()
    assert ours["batch"]["size"]
    assert "default of" in text


def test_every_setting_in_the_tables_exists() -> None:
    composed = {"dpo.sft"}
    for project in PROJECTS.values():
        for variant in project.variants.values():
            config = read_config(variant.trainer)
            for key, rule in {**project.keys, **variant.keys}.items():
                several = [v for v in (rule.values or {}).values() if isinstance(v, dict)]
                names = {name for each in several for name in each}
                names |= {rule.ours} if rule.kind == "set" and rule.ours else set()
                for name in names - composed:
                    section, _, field = name.partition(".")
                    cls = type(getattr(config, section))
                    if section == "lora":
                        continue
                    known = [setting_name(item) for item in attrs.fields(cls)] if field else [""]
                    assert field in known, (project.title, key, name)
            assert set(project.defaults) <= set(project.keys), project.title
            assert set(variant.defaults) <= {*project.keys, *variant.keys}, project.title


def test_error_messages_read_the_same_table() -> None:
    assert FOREIGN["learning_rate"] == "optim.lr"
    assert FOREIGN["max_len"] == FOREIGN["cutoff_len"] == "data.max_tokens"
    assert FOREIGN["sample_packing"] == "always on"


@pytest.mark.parametrize(
    ("name", "text", "words", "message"),
    [
        (
            "a.yaml",
            "model_name_or_path: m\nlearning_rate: 1e-5\nuse_peft: true",
            [],
            "{} does not say which trainer of TRL it is for; pass --from trl/sft or "
            "--from trl/dpo or --from trl/kto or --from trl/reward or --from trl/gkd or "
            "--from trl/cpo or --from trl/orpo or --from trl/prm",
        ),
        (
            "a.yaml",
            "learning_rate: 1e-5",
            [],
            "{} could be of trl or axolotl or llamafactory or openrlhf; pass --from trl or "
            "another one",
        ),
        ("a.yaml", "stage: ppo\ncutoff_len: 3", [], "LLaMA-Factory's ppo has no counterpart here; "
         "those of sft, pt, dpo, kto, rm have one"),
        ("a.yaml", "rl: grpo\nbase_model: m", [], "Axolotl's grpo has no counterpart here; those "
         "of sft, dpo, ipo, orpo, simpo, kto, reward_model, process_reward_model have one"),
        ("a.py", "import trl", [], "{} is a Python script; write its arguments into a YAML file"),
        ("a.sh", "echo", [], "{} starts no training that is known; it must have one command line "
         "of TRL, Axolotl, LLaMA-Factory, OpenRLHF"),
        ("a.sh", "trl sft --a 1\ntrl dpo --b 2", [], "{} starts 2 trainings; it must have one "
         "command line of TRL, Axolotl, LLaMA-Factory, OpenRLHF"),
        ("a.sh", "trl sft --a 'b", [], "{}: the command line cannot be parsed (No closing "
         "quotation)"),
        ("a.yaml", "a: 1", ["--from", "verl"], "--from verl is not known; available: trl, axolotl, "
         "llamafactory, openrlhf"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_one_clear_line(
    name: str, text: str, words: list[str], message: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / name
    path.write_text(text)
    assert main(["migrate", str(path), *words]) == 2
    assert capsys.readouterr().err == f"error: {message.format(path)}\n"


@pytest.mark.parametrize(
    "rest",
    [
        " && echo done", "; rlhf run", " || exit 1", " | tee log.txt", " &", " > log.txt",
        " >log.txt 2>&1", " &> log.txt", " 2>errors.txt --seed 3 # a; b",
    ],
)  # fmt: skip
def test_a_command_ends_where_the_shell_ends_it(tmp_path: Path, rest: str) -> None:
    words = "trl sft --model_name_or_path 'a;b>c' --dataset_name org/d --learning_rate 2e-6"
    ours, text = migrated(tmp_path / "sft.sh", words + rest)
    assert (ours["model"]["path"], ours["optim"]["lr"]) == ("a;b>c", 2e-6)
    assert ours["train"]["seed"] == (3 if "--seed" in rest else 42)
    assert "Not known" not in text


def test_the_output_may_be_in_a_new_folder_and_a_refusal_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lf.yaml"
    file.write_text(LLAMA_FACTORY)
    assert main(["migrate", str(file), "-o", str(tmp_path / "new" / "ours.yaml")]) == 0
    assert (tmp_path / "new" / "ours.yaml").is_file()
    capsys.readouterr()
    assert main(["migrate", str(file), "-o", str(file / "ours.yaml")]) == 2
    assert capsys.readouterr().err == (
        f"error: cannot write to {file} (File exists); choose another location\n"
    )
    name = "x" * 256
    assert main(["migrate", str(file), "-o", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err == (
        f"error: cannot write to {tmp_path / name} (File name too long); choose another location\n"
    )


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lf.yaml"
    file.write_text(LLAMA_FACTORY)
    assert main(["migrate", str(file), "-o", str(file)]) == 2
    assert capsys.readouterr().err == f"error: {file} exists; choose another file\n"


def test_missing_settings_are_reported_with_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rm.sh"
    file.write_text("python -m openrlhf.cli.train_rm --pretrain m --strange 3")
    assert main(["migrate", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "# Not known to `rlhf migrate`: strange\n" in out
    assert err == (
        f"{file} is OpenRLHF's rm: to be completed, because data.train is missing; pass "
        "--data FILE_OR_HUB_NAME\n"
    )


def test_a_command_line_with_a_yaml_file_has_precedence_over_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model_name_or_path: m\nlearning_rate: 1e-3\nseed: 7\n")
    script = tmp_path / "run.sh"
    script.write_text("trl sft --config base.yaml --learning_rate 2e-4 --packing")
    arguments = read_arguments(script)
    assert (arguments.project, arguments.variant) == ("trl", "sft")
    settings = translate(arguments, folder=tmp_path).settings
    assert (settings["optim.lr"], settings["train.seed"]) == (2e-4, 7)
    script.write_text("llamafactory-cli train base.yaml learning_rate=2e-4 stage=rm")
    arguments = read_arguments(script)
    assert (arguments.project, arguments.variant) == ("llamafactory", "rm")
    assert translate(arguments, folder=tmp_path).settings["optim.lr"] == 2e-4


def test_a_long_path_and_a_date_are_written_as_text(tmp_path: Path) -> None:
    model = f"/models/{'long-' * 20}"
    text = f"model_name_or_path: {model}\ndataset_name: a\noutput_dir: 2026-11-28\n"
    ours, _ = migrated(tmp_path / "a.yaml", text, "--from", "trl/sft")
    assert (ours["model"]["path"], ours["output"]) == (model, "2026-11-28")


def test_fractional_epochs_are_ours_and_fractional_save_steps_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("num_train_epochs: 0.5\nsave_steps: 0.1\nlr_scheduler_type: constant\n")
    migration = translate(read_arguments(file, "trl/sft"), folder=tmp_path)
    assert migration.settings["train.epochs"] == 0.5
    assert not any("epochs" in key for key in migration.notes)
    assert migration.notes["save_steps 0.1"] == (
        "a share of the run; set checkpoint.every to steps"
    )
    assert migration.settings["optim.warmup"] == 0.0
    file.write_text("max_steps: 10\n")
    settings = translate(read_arguments(file, "trl/sft"), folder=tmp_path).settings
    assert settings["train.steps"] == 10
    assert "train.epochs" not in settings


def test_only_numbers_with_an_exponent_are_read_out_of_texts(tmp_path: Path) -> None:
    migration = of_trl(
        tmp_path, "model_name_or_path: org/model", "output_dir: '2024'", "model_revision: 12e4567",
        "learning_rate: 2e-4", "weight_decay: 1.e-1",
    )  # fmt: skip
    names = ("output", "model.revision", "optim.lr", "optim.weight_decay")
    settings = [migration.settings[name] for name in names]
    assert settings == ["2024", "12e4567", 2e-4, 0.1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gradient_accumulation_steps: auto",
         "gradient_accumulation_steps is 'auto'; write the number that was used"),
        ("per_device_train_batch_size: [2]",
         "per_device_train_batch_size is [2]; write the number that was used"),
        ("per_device_train_batch_size: 2.5",
         "per_device_train_batch_size is 2.5; write the whole number that was used"),
        ("num_train_epochs: x", "num_train_epochs is 'x'; write the number that was used"),
        ("eval_steps: none", "eval_steps is 'none'; write the number that was used"),
        ("lr_scheduler_kwargs: 3",
         "lr_scheduler_kwargs is 3; write a mapping such as {min_lr: 1.0e-6}"),
        ("datasets: 3", "datasets is 3; write a list of mappings such as `- path: NAME`"),
        ("datasets: [3]", "datasets is [3]; write a list of mappings such as `- path: NAME`"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_one_clear_line(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as error:
        of_trl(tmp_path, "model_name_or_path: m", line)
    assert str(error.value) == message


@pytest.mark.parametrize("project", PROJECTS)
def test_no_value_of_a_key_is_a_defect(project: str, tmp_path: Path) -> None:
    for name, variant in PROJECTS[project].variants.items():
        first = variant is next(iter(PROJECTS[project].variants.values()))
        for key in {**(PROJECTS[project].keys if first else {}), **variant.keys}:
            for value in ("x", "$X", [None], {"a": 1}):
                arguments = Arguments(project=project, variant=name, keys={key: value})
                with contextlib.suppress(RLHFError):
                    translate(arguments, folder=tmp_path)


def test_a_variable_of_the_shell_has_its_value_or_its_default_or_is_to_be_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "sft.sh"
    script.write_text(
        "SEED=${SEED:-7}\ntrl sft --model_name_or_path m --dataset_name d --seed $SEED "
        "--gradient_accumulation_steps ${GAS:-2} --per_device_train_batch_size $BS "
        '--num_train_epochs ${E} "$@"'
    )
    assert main(["migrate", str(script)]) == 0
    out, err = capsys.readouterr()
    assert err == (
        f"{script} is TRL's sft: to be completed, because these have no value: "
        "per_device_train_batch_size, num_train_epochs\n"
    )
    assert "# To be completed:\n# - per_device_train_batch_size: $BS has no value in the" in out
    assert yaml.safe_load(out)["train"] == {"seed": 7}
    assert "batch" not in yaml.safe_load(out)
    script.write_text(script.read_text().replace("$BS", "4").replace("${E}", "${E:-1}"))
    assert main(["migrate", str(script)]) == 0
    ours = yaml.safe_load(capsys.readouterr().out)
    assert (ours["batch"]["size"], ours["train"]["epochs"]) == (8, 1)


def test_a_process_reward_model_of_trl_becomes_ours(tmp_path: Path) -> None:
    words = "accelerate launch examples/scripts/prm.py --model_name_or_path gpt2 --dataset_name a/b"
    more = " --step_separator ';' --train_on_last_step_only --max_completion_length 9"
    ours, text = migrated(tmp_path / "prm.sh", words + more)
    assert ours["prm"] == {"separator": ";", "steps": "last"}
    assert ours["optim"]["lr"] == 1e-5
    assert "- max_completion_length 9: only the whole length is limited here" in text


def test_shares_of_the_run_and_none_become_no_settings(tmp_path: Path) -> None:
    words = "trl sft --model_name_or_path m --dataset_name a/b --eval_strategy steps"
    more = " --logging_steps 0.05 --max_length None --save_steps 50.0"
    ours, text = migrated(tmp_path / "sft.sh", words + more)
    assert "log_every" not in ours["train"]
    assert "max_tokens" not in ours["data"]
    assert ours["checkpoint"] == {"every": 50}
    assert "- logging_steps 0.05: a share of the run; set train.log_every to steps" in text
    assert "- max_length null: the default of data.max_tokens is used here" in text
    assert "eval: [{path: a/b, split: test}]  # dataset_name\n" in text


def test_keys_of_another_trainer_of_the_project_are_not_needed(tmp_path: Path) -> None:
    keys = {"stage": "dpo", "train_on_prompt": True, "strange": 1}
    arguments = Arguments(project="llamafactory", variant="dpo", keys=keys)
    migration = translate(arguments, folder=tmp_path)
    assert (migration.unneeded, migration.unknown) == (["train_on_prompt"], ["strange"])


def of_trl(folder: Path, *lines: str) -> Migration:
    """What becomes of a file of TRL's SFT."""
    (folder / "trl.yaml").write_text("\n".join(lines))
    return translate(read_arguments(folder / "trl.yaml", "trl/sft"), folder=folder)


def test_migrate_needs_no_torch(tmp_path: Path) -> None:
    file = tmp_path / "lf.yaml"
    file.write_text(LLAMA_FACTORY)
    program = "import sys; from rlhf.cli import main; main(sys.argv[1:]); "
    program += "sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "migrate", str(file)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_bad_dataset_info_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text("{")
    file = tmp_path / "lf.yaml"
    file.write_text(LLAMA_FACTORY)
    with pytest.raises(RLHFError, match=r"^cannot read .*/dataset_info.json: Expecting"):
        translate(read_arguments(file), folder=tmp_path)
