"""LLaMA-Factory: the YAML of `llamafactory-cli train`."""

from typing import Any

from rlhf_migrate.foreign.project import Project, Rule, Variant, lost, read, to, unneeded
from rlhf_migrate.foreign.transformers import (
    DEFAULTS,
    HELD_OUT,
    IMAGE_SIZES,
    LORA,
    PACKING,
    PER_EXAMPLE,
    TRACKERS,
    TRANSFORMERS,
)

TEMPLATE = "the tokenizer's own chat template is used here; data.chat_template replaces it"
BITS = {4: "nf4"}
PARTS = "set model.train to the parts that are trained; on images, the projector is, without lora"

KEYS: dict[str, Rule] = {
    **TRANSFORMERS,
    **read("stage"),
    "model_name_or_path": to("model.path"),
    "model_revision": to("model.revision", off=(None, "", "main")),
    "adapter_name_or_path": to("model.adapter"),
    "trust_remote_code": to("model.trust_remote_code", off=(None, False)),
    "pure_bf16": to("model.dtype", {True: "bf16"}, off=(None, False)),
    "finetuning_type": to("lora", {"lora": True, "full": False}),
    "lora_rank": to("lora.rank"),
    "lora_alpha": to("lora.alpha"),
    "lora_dropout": to("lora.dropout"),
    "lora_target": to("lora.targets", {"all": "all-linear"}),
    "use_muon": to("optim.name", {True: "muon"}, off=(None, False)),
    **LORA,
    "additional_target": to("lora.modules_to_save"),
    "quantization_bit": to("model.quantize", BITS),
    **read("dataset dataset_dir max_samples", "data.train"),
    **read("eval_dataset", "data.eval"),
    "mix_strategy": Rule(values={"concat": {}}),
    **lost("val_size", HELD_OUT),
    **read("template", "data.chat_template", TEMPLATE),
    **read("enable_thinking", "data.chat_template_kwargs"),
    "cutoff_len": to("data.max_tokens"),
    "preprocessing_num_workers": to("data.processes"),
    **read("packing neat_packing", "always on", PACKING),
    **read("early_stopping_steps", "train.patience", "set train.patience and checkpoint.best"),
    **read("use_swanlab", "observers", TRACKERS),
    "moe_aux_loss_coef": to("model.router_loss", note=PER_EXAMPLE),
    **lost(
        "create_new_adapter default_system interleave_probs"
        " loraplus_lr_ratio mask_history new_special_tokens_config"
        " add_tokens add_special_tokens pissa_init preserve_thinking ref_model ref_model_adapters"
        " resize_vocab rope_scaling shift_attn streaming tokenized_path tool_format use_adam_mini"
        " use_apollo use_asft_loss use_badam use_dft_loss use_eaft_loss use_galore"
        " use_llama_pro disable_shuffling train_from_scratch"
    ),
    "freeze_vision_tower": Rule(
        values={True: {}}, note="set model.train to [language, projector, vision]"
    ),
    "freeze_multi_modal_projector": Rule(values={False: {}}, note=PARTS),
    "freeze_language_model": Rule(values={False: {}}, note=PARTS),
    **lost("image_max_pixels image_min_pixels", IMAGE_SIZES),
    **lost("media_dir", "relative paths of images begin at the folder of the data file"),
    **unneeded(
        "block_diag_attn buffer_size cache_dir compute_accuracy data_shared_file_system"
        " disable_gradient_checkpointing double_quantization enable_liger_kernel"
        " eval_on_each_dataset export_dir flash_attn ignore_pad_token_for_loss"
        " include_effective_tokens_per_second low_cpu_mem_usage overwrite_cache"
        " plot_loss preprocessing_batch_size print_param_status quantization_method"
        " quantization_type ray_num_workers upcast_layernorm use_fast_tokenizer use_reentrant_gc"
        " use_unsloth use_unsloth_gc video_max_pixels video_min_pixels"
    ),
}
SFT = {"train_on_prompt": to("sft.train_on", {True: "everything", False: "answers"})}
DPO = {
    "pref_beta": to("dpo.beta"),
    "pref_loss": to(
        "dpo.loss", {name: name for name in ("sigmoid", "hinge", "ipo", "orpo", "simpo")}
    ),
    "pref_ftx": to("dpo.sft", off=(None, 0)),
    "simpo_gamma": to("dpo.gamma"),
    "dpo_label_smoothing": to("dpo.label_smoothing", off=(None, 0)),
    **lost("ld_alpha pref_bco_weight"),
}
KTO = {
    "pref_beta": to("kto.beta"),
    "kto_chosen_weight": to("kto.desirable_weight"),
    "kto_rejected_weight": to("kto.undesirable_weight"),
    **lost("pref_ftx"),
}
NAMES = "rename them in the rows"
DATA_SET = {
    **read("file_name hf_hub_url subset split folder num_samples", "data.train"),
    **read("prompt query response history messages system tools images", "columns"),
    **read("chosen rejected kto_tag role_tag content_tag", "columns"),
    "user_tag": Rule(values={"human": {}, "user": {}}, note=NAMES),
    "assistant_tag": Rule(values={"gpt": {}, "assistant": {}}, note=NAMES),
    "observation_tag": Rule(values={"observation": {}, "tool": {}}, note=NAMES),
    "function_tag": Rule(values={"function_call": {}}, note=NAMES),
    "system_tag": Rule(values={"system": {}}, note=NAMES),
    **lost("videos audios revision script_url cloud_file_name"),
    **lost("ms_hub_url om_hub_url", "data sets are read from files and the Hugging Face Hub"),
    **unneeded("formatting ranking"),
}
SHARED: dict[str, Any] = {
    **DEFAULTS,
    "bf16": False,
    "cutoff_len": 2048,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_dropout": 0.0,
    "lora_target": "all",
}
LLAMA_FACTORY = Project(
    title="LLaMA-Factory",
    version="0.9.5",
    command=r"llamafactory-cli\s+train|src/train\.py",
    chosen_by=("stage",),
    usual="sft",
    keys=KEYS,
    defaults=SHARED,
    variants={
        "sft": Variant(trainer="sft", keys=SFT, defaults={"train_on_prompt": False}),
        "pt": Variant(trainer="sft", settings={"sft.train_on": "everything"}),
        "dpo": Variant(
            trainer="dpo",
            keys=DPO,
            defaults={"pref_beta": 0.1, "simpo_gamma": 0.5},
            settings={"dpo.loss": "sigmoid"},
        ),
        "kto": Variant(trainer="kto", keys=KTO, defaults={"pref_beta": 0.1}),
        "rm": Variant(trainer="rm"),
    },
    data_set=DATA_SET,
)
