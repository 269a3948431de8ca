"""Settings of TRL, Transformers, OpenRLHF and Axolotl, which error messages translate."""

NAMES = {
    "model.path": "model_name_or_path base_model pretrain",
    "model.dtype": "torch_dtype bf16 fp16",
    "model.quantize": "load_in_4bit",
    "model.recompute": "gradient_checkpointing",
    "data.train": "dataset datasets dataset_name train_dataset",
    "data.eval": "eval_dataset",
    "data.max_tokens": "max_length max_seq_length sequence_len max_len cutoff_len",
    "batch.size": "train_batch_size per_device_train_batch_size",
    "batch.tokens": "micro_batch_size micro_train_batch_size per_device_eval_batch_size",
    "derived from batch.size and batch.tokens": "gradient_accumulation_steps",
    "always on": "packing sample_packing packing_samples",
    "optim.lr": "learning_rate",
    "optim.name": "optimizer",
    "optim.schedule": "lr_scheduler lr_scheduler_type",
    "optim.warmup": "warmup_ratio warmup_steps lr_warmup_ratio",
    "optim.weight_decay": "l2",
    "optim.clip": "max_grad_norm max_norm",
    "optim.betas": "adam_beta1 adam_beta2 adam_betas",
    "optim.eps": "adam_epsilon",
    "train.epochs": "num_train_epochs num_epochs max_epochs",
    "train.steps": "max_steps",
    "train.log_every": "logging_steps",
    "train.eval_every": "eval_steps",
    "train.deterministic": "full_determinism",
    "checkpoint.every": "save_steps",
    "checkpoint.keep": "save_total_limit max_ckpt_num",
    "the flag --resume": "resume_from_checkpoint",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.rslora": "use_rslora",
    "lora.dropout": "lora_dropout",
    "lora.targets": "target_modules lora_target_modules",
    "deepspeed.stage": "zero_stage",
    "observers": "report_to",
    "output": "output_dir save_path ckpt_path",
}
FOREIGN = {name: ours for ours, names in NAMES.items() for name in names.split()}
"""Our name by theirs, as in `'learning_rate' is optim.lr here`."""
REMOVED = {"offload": "full"}
"""Values of earlier versions, and what replaces them (of `model.recompute`)."""
