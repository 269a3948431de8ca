"""Arguments of Transformers' trainer (TrainingArguments, 5.23, and names of version 4), which TRL
and LLaMA-Factory take whole and Axolotl in part."""

from typing import Any

from rlhf.plugin import LORA_VARIANTS
from rlhf_migrate.foreign.project import OFF, Rule, factor, lost, read, to, unneeded

SCHEDULES: dict[str, Any] = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    # Without a warm-up, whatever warmup_steps says.
    "constant": {"optim.schedule": "constant", "optim.warmup": 0.0},
    "constant_with_warmup": "constant",
}
ADAMW: dict[str, Any] = {
    name: {}
    for name in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw")
}
"""Names of AdamW with 32-bit states."""
ONLY_ADAMW = "AdamW with 32-bit states is used here; set optim.name for another optimizer"
PER_EXAMPLE = "here the router loss is computed over each example"
PACKING = (
    "packing is always on here. There, a batch counts packed rows; here, batch.size counts "
    "examples: multiply it by the examples in a packed row"
)
STEPS = (*OFF, "steps")
IMAGE_SIZES = "the processor resizes images; set its sizes in a copy of the model's folder"
HELD_OUT = "rows are not split here; put held-out rows into a file and name it in data.eval"
EPOCH_ENDS = (
    "evaluations and checkpoints are counted in steps here; set train.eval_every and "
    "checkpoint.every"
)
TRACKERS = "install rlhf-observer-NAME and name it in `observers`"

LORA = {theirs: to(f"lora.{ours}", off=(None, False)) for ours, theirs in LORA_VARIANTS.items()}
"""peft's names of variants of LoRA, which the projects take as they are."""
BATCH = {
    "per_device_train_batch_size": factor("batch.size"),
    "gradient_accumulation_steps": factor("derived from batch.size and batch.tokens"),
    **unneeded("per_device_eval_batch_size", "batch.tokens"),
}
OPTIMIZER: dict[str, Rule] = {
    "learning_rate": to("optim.lr"),
    "optim": Rule(values=ADAMW, note=ONLY_ADAMW),
    "weight_decay": to("optim.weight_decay"),
    "adam_beta1": to("optim.betas"),
    "adam_beta2": to("optim.betas"),
    "adam_epsilon": to("optim.eps"),
    "max_grad_norm": to("optim.clip"),
    "warmup_steps": to("optim.warmup"),
    "warmup_ratio": to("optim.warmup", off=(None, 0)),
    "lr_scheduler_type": to("optim.schedule", SCHEDULES),
    **read("lr_scheduler_kwargs", "optim.min_lr"),
}
LENGTH = {
    "num_train_epochs": to("train.epochs"),
    "max_steps": to("train.steps", off=(None, -1, 0)),
    "seed": to("train.seed", note="the order of rows differs from theirs"),
    "full_determinism": to("train.deterministic", off=(None, False)),
}
PRECISION = {
    "bf16": to("model.dtype", {True: "bf16", "auto": "bf16", "full": "bf16", False: "fp32"}),
    "fp16": to("model.dtype", {True: "fp16"}, off=(None, False)),
}
REPORTS = {
    "logging_steps": to("train.log_every"),
    "eval_strategy": Rule(kind="read", note=EPOCH_ENDS, off=STEPS),
    "evaluation_strategy": Rule(kind="read", note=EPOCH_ENDS, off=STEPS),
    "eval_steps": to("train.eval_every"),
    "eval_on_start": to("train.eval_at_start", off=(None, False)),
    "save_strategy": Rule(kind="read", note=EPOCH_ENDS, off=STEPS),
    "save_steps": to("checkpoint.every"),
    "save_total_limit": to("checkpoint.keep"),
    **read(
        "load_best_model_at_end metric_for_best_model",
        note="set checkpoint.best to a metric such as eval/loss",
    ),
    **read("early_stopping_patience", "train.patience", "set train.patience and checkpoint.best"),
    **read("report_to", "observers", TRACKERS),
    "output_dir": to("output"),
    **read("resume_from_checkpoint", "the flag --resume", "pass --resume to `rlhf run`"),
    **read("push_to_hub", note="upload with `rlhf push` after the run"),
}
MACHINE = {
    **read("deepspeed", "deepspeed.stage"),
    **unneeded("gradient_checkpointing", "model.recompute"),
    **unneeded(
        "auto_find_batch_size average_tokens_across_devices dataloader_drop_last"
        " dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory"
        " dataloader_prefetch_factor ddp_backend ddp_bucket_cap_mb ddp_find_unused_parameters"
        " ddp_timeout disable_tqdm do_eval do_predict do_train eval_accumulation_steps"
        " eval_delay fsdp fsdp_config gradient_checkpointing_kwargs group_by_length"
        " hub_model_id hub_private_repo hub_strategy hub_token include_num_input_tokens_seen"
        " liger_kernel_config local_rank log_level log_on_each_node logging_first_step"
        " logging_strategy overwrite_output_dir per_gpu_train_batch_size project"
        " remove_unused_columns run_name save_on_each_node save_only_model save_safetensors"
        " skip_memory_metrics tf32 torch_compile torch_compile_backend torch_compile_mode"
        " torch_empty_cache_steps trackio_space_id use_cache use_cpu use_liger_kernel"
        " train_sampling_strategy"
    ),
}
OTHERS = lost(
    "label_smoothing_factor neftune_noise_alpha optim_args optim_target_modules data_seed"
)
TRANSFORMERS = {**BATCH, **OPTIMIZER, **LENGTH, **PRECISION, **REPORTS, **MACHINE, **OTHERS}
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
    "seed": 42,
}
