"""Axolotl: the YAML of `axolotl train`."""

from rlhf_migrate.foreign.project import Project, Rule, Variant, factor, lost, read, to, unneeded
from rlhf_migrate.foreign.transformers import (
    ADAMW,
    DEFAULTS,
    EPOCH_ENDS,
    HELD_OUT,
    IMAGE_SIZES,
    LENGTH,
    LORA,
    ONLY_ADAMW,
    OPTIMIZER,
    PACKING,
    PRECISION,
    REPORTS,
    SCHEDULES,
    TRACKERS,
)
from rlhf_migrate.foreign.trl import LOSSES

RENAMED = ("num_train_epochs", "lr_scheduler_type")
"""Keys of Transformers for which Axolotl has its own, with other defaults."""

KEYS: dict[str, Rule] = {
    **OPTIMIZER,
    **LENGTH,
    **PRECISION,
    **REPORTS,
    "base_model": to("model.path"),
    "trust_remote_code": to("model.trust_remote_code", off=(None, False)),
    "micro_batch_size": factor("batch.tokens"),
    "gradient_accumulation_steps": factor("derived from batch.size and batch.tokens"),
    "num_epochs": to("train.epochs"),
    "optimizer": Rule(ours="optim.name", values=ADAMW, note=ONLY_ADAMW),
    "lr_scheduler": to("optim.schedule", SCHEDULES),
    "cosine_min_lr_ratio": to("optim.min_lr"),
    "sequence_len": to("data.max_tokens"),
    "excess_length_strategy": to(
        "data.too_long", {"drop": "drop", "truncate": "cut", "raise": "error"}
    ),
    **read("datasets", "data.train"),
    **read("test_datasets", "data.eval"),
    **lost("val_set_size", HELD_OUT),
    "dataset_processes": to("data.processes"),
    "dataset_num_proc": to("data.processes"),
    **read("chat_template", "data.chat_template"),
    "chat_template_jinja": to("data.chat_template", note="this must be a file here"),
    "chat_template_kwargs": to("data.chat_template_kwargs"),
    **read("sample_packing", "always on", PACKING),
    "adapter": to(
        "lora",
        {"lora": True, "qlora": {"lora": True, "model.quantize": "nf4"}, "none": False},
    ),
    "lora_model_dir": to("model.adapter"),
    "lora_r": to("lora.rank"),
    "lora_alpha": to("lora.alpha"),
    "lora_dropout": to("lora.dropout"),
    "lora_target_modules": to("lora.targets"),
    "lora_target_parameters": to("lora.parameters"),
    "lora_target_linear": to("lora.targets", {True: "all-linear"}, off=(None, False)),
    **{f"peft_{name}": rule for name, rule in LORA.items()},
    "lora_modules_to_save": to("lora.modules_to_save"),
    "load_in_4bit": to("model.quantize", {True: "nf4"}, off=(None, False)),
    **read("deepspeed", "deepspeed.stage"),
    "context_parallel_size": to("deepspeed.sequence_parallel", off=(None, 1)),
    "sequence_parallel_degree": to("deepspeed.sequence_parallel", off=(None, 1)),
    "tensor_parallel_size": to("deepspeed.tensor_parallel", off=(None, 1)),
    **read("rl reward_model process_reward_model"),
    **read("saves_per_epoch evals_per_epoch", note=EPOCH_ENDS),
    **read("use_tensorboard use_wandb wandb_project use_mlflow use_trackio", "observers", TRACKERS),
    **lost(
        "load_in_8bit loraplus_lr_ratio"
        " peft_init_lora_weights peft_layers_to_transform relora tokenizer_config special_tokens"
        " tokens default_system_message embedding_lr embedding_lr_scale lr_groups"
        " neftune_noise_alpha unfrozen_parameters reinit_weights curriculum_sampling"
        " cosine_constant_lr_ratio pretraining_dataset streaming eot_tokens min_sample_len"
        " overrides_of_model_config eval_sequence_len trainer_cls use_eaft qat"
    ),
    "freeze_mm_modules": Rule(
        values={False: {}}, note="set model.train to [language], if the rows have images"
    ),
    **lost("image_size image_resize_algorithm", IMAGE_SIZES),
    **unneeded("gradient_checkpointing", "model.recompute"),
    **unneeded(
        "attn_implementation auto_resume_from_checkpoints base_model_config bf16_full_eval"
        " chunked_cross_entropy cut_cross_entropy dataloader_num_workers dataloader_pin_memory"
        " dataloader_prefetch_factor dataset_exact_deduplication dataset_prepared_path ddp"
        " ddp_timeout device_map eager_attention eval_batch_size eval_sample_packing"
        " eval_table_size flash_attention flash_attn_cross_entropy flash_attn_fuse_mlp"
        " flex_attention fsdp fsdp_config fsdp_version gc_steps gradient_checkpointing_kwargs"
        " group_by_length hub_model_id hub_strategy is_llama_derived_model is_mistral_derived_model"
        " is_qwen_derived_model liger_cross_entropy liger_fused_linear_cross_entropy"
        " liger_glu_activation liger_layer_norm liger_rms_norm liger_rope local_rank"
        " lora_embedding_kernel lora_fan_in_fan_out lora_mlp_kernel lora_o_kernel lora_qkv_kernel"
        " low_cpu_mem_usage mlflow_experiment_name model_type multipack_real_batches"
        " pad_to_multiple_of pad_to_sequence_len plugins processor_type sample_packing_bin_size"
        " sample_packing_group_size save_first_step save_only_model save_safetensors"
        " sdp_attention shuffle_merged_datasets skip_prepare_dataset strict tf32"
        " tokenizer_type tokenizer_use_fast torch_compile torch_dtype wandb_entity"
        " wandb_log_model wandb_mode wandb_name wandb_run_id wandb_watch xformers_attention"
    ),
}
DATA_SET = {
    **read("path name split data_files type", "data.train"),
    **read(
        "field field_messages field_tools field_instruction field_input field_output", "columns"
    ),
    **read("field_prompt field_completion field_chosen field_rejected field_label", "columns"),
    **read("field_system message_property_mappings", "columns"),
    **read("message_field_role message_field_content", "columns"),
    "chat_template": Rule(
        values={"tokenizer_default": {}},
        note=(
            "the tokenizer's own template is used here; data.chat_template replaces it by a file "
            "or chatml"
        ),
    ),
    "roles_to_train": Rule(values={"assistant": {}, "gpt": {}}, off=(None,)),
    "train_on_eos": Rule(values={"turn": {}}),
    "message_field_training": Rule(values={"train": {}}, note="rename it to train in the rows"),
    "step_separator": Rule(kind="lost", note="set prm.separator"),
    **lost("train_on_last_step_only", "set prm.steps to last"),
    **lost(
        "format no_input_format system_format prompt_format completion_format chosen_format"
        " rejected_format",
        "prompts are used as they are; put it into the rows",
    ),
    **lost(
        "drop_system_message field_thinking input_format input_transform max_completion_length"
        " message_field_training_detail revision roles shards shards_idx"
        " skip split_thinking system_prompt template_thinking_key chat_template_jinja"
    ),
    **unneeded("ds_type preprocess_shards trust_remote_code"),
}
RL = {
    "rl_beta": to("dpo.beta"),
    "dpo_label_smoothing": to("dpo.label_smoothing", off=(None, 0)),
    **lost("dpo_use_weighting trl"),
    **unneeded("dpo_padding_free dpo_use_liger_kernel precompute_ref_log_probs"),
}
DPO = RL | {"dpo_loss_type": to("dpo.loss", LOSSES)} | read("dpo_loss_weights", "dpo.loss")
SIMPO = RL | {"cpo_alpha": to("dpo.sft"), "simpo_gamma": to("dpo.gamma")}
KTO = {
    "rl_beta": to("kto.beta"),
    "kto_desirable_weight": to("kto.desirable_weight"),
    "kto_undesirable_weight": to("kto.undesirable_weight"),
    **lost("trl"),
}
BETA = {"rl_beta": 0.1}
CENTRING = {"center_rewards_coefficient": to("rm.centring", off=(None, 0))}
AXOLOTL = Project(
    title="Axolotl",
    version="0.19",
    command=r"axolotl(?:\.cli\.|\s+)train",
    chosen_by=("rl", "process_reward_model", "reward_model"),
    usual="sft",
    keys=KEYS,
    defaults={
        **{key: value for key, value in DEFAULTS.items() if key in KEYS and key not in RENAMED},
        "micro_batch_size": 1,
        "num_epochs": 1,
        "lr_scheduler": "cosine",
        "warmup_steps": 0.03,
        "sequence_len": 512,
        "excess_length_strategy": "drop",
        "bf16": "auto",
        "adapter": "none",
        "lora_dropout": 0.0,
    },
    variants={
        "sft": Variant(
            trainer="sft",
            keys={"train_on_inputs": to("sft.train_on", {True: "everything", False: "answers"})},
            defaults={"train_on_inputs": False},
        ),
        "dpo": Variant(trainer="dpo", keys=DPO, defaults=BETA, settings={"dpo.loss": "sigmoid"}),
        "ipo": Variant(trainer="dpo", keys=RL, defaults=BETA, settings={"dpo.loss": "ipo"}),
        "orpo": Variant(
            trainer="dpo",
            keys=RL | {"orpo_alpha": to("dpo.beta")},
            defaults=BETA,
            settings={"dpo.loss": "orpo"},
        ),
        "simpo": Variant(
            trainer="dpo",
            keys=SIMPO,
            defaults=BETA | {"cpo_alpha": 1.0, "simpo_gamma": 0.5},
            settings={"dpo.loss": "simpo"},
        ),
        "kto": Variant(trainer="kto", keys=KTO, defaults=BETA),
        "reward_model": Variant(trainer="rm", keys=CENTRING),
        "process_reward_model": Variant(trainer="prm"),
    },
    data_set=DATA_SET,
    empty_is_default=True,
)
