"""OpenRLHF: command lines of `openrlhf.cli.train_sft` and its kin outside of Ray."""

from typing import Any

from rlhf_migrate.foreign.project import Project, Rule, Variant, lost, read, to, unneeded
from rlhf_migrate.foreign.transformers import PER_EXAMPLE, SCHEDULES, TRACKERS

TURNS = "without it, only the last turn of the assistant is trained on there; here every turn is"
FROZEN = to("deepspeed.frozen", {True: "offload"}, off=(None, False))

KEYS: dict[str, Rule] = {
    "pretrain": to("model.path"),
    "param_dtype": to("model.dtype", {name: name for name in ("bf16", "fp16", "fp32")}),
    "bf16": to("model.dtype", {True: "bf16"}, off=(None, False)),
    **read("dataset dataset_probs dataset_split train_split max_samples", "data.train"),
    **read("eval_dataset eval_split", "data.eval"),
    **read("input_key output_key prompt_key chosen_key rejected_key label_key", "data.train"),
    **read("apply_chat_template", "data.chat_template"),
    "tokenizer_chat_template": to("data.chat_template", note="this must be a file here"),
    **read("input_template", note="prompts are used as they are; put it into the rows"),
    "max_len": to("data.max_tokens"),
    "train_batch_size": to("batch.size"),
    "max_epochs": to("train.epochs"),
    "learning_rate": to("optim.lr"),
    "lr_warmup_ratio": to("optim.warmup"),
    "lr_scheduler": to("optim.schedule", SCHEDULES),
    "min_lr_ratio": to("optim.min_lr"),
    "l2": to("optim.weight_decay"),
    "adam_betas": to("optim.betas"),
    "max_norm": to("optim.clip"),
    "seed": to("train.seed", note="the order of rows differs from theirs"),
    "full_determinism": to("train.deterministic", off=(None, False)),
    "lora_rank": to("lora.rank", off=(None, 0)),
    "lora_alpha": to("lora.alpha"),
    "lora_dropout": to("lora.dropout"),
    "target_modules": to("lora.targets"),
    "load_in_4bit": to("model.quantize", {True: "nf4"}, off=(None, False)),
    "zero_stage": to("deepspeed.stage"),
    "ring_attn_size": to("deepspeed.sequence_parallel", off=(None, 1)),
    "ds_tensor_parallel_size": to("deepspeed.tensor_parallel", off=(None, 1)),
    "adam_offload": to("deepspeed.offload_optimizer", off=(None, False)),
    "ref_offload": FROZEN,
    "zpg": to("deepspeed.hpz_partition_size", off=(None, 1)),
    "logging_steps": to("train.log_every"),
    "eval_steps": to("train.eval_every", off=(None, -1)),
    "save_steps": to("checkpoint.every"),
    "max_ckpt_num": to("checkpoint.keep"),
    "max_ckpt_mem": to("checkpoint.max_gb", off=(None, 100000000.0)),
    "save_path": to("output"),
    "ckpt_path": Rule(ours="output", kind="unneeded"),
    **read("load_checkpoint", "the flag --resume", "pass --resume to `rlhf run`"),
    **read("use_wandb use_tensorboard", "observers", TRACKERS),
    "aux_loss_coef": to("model.router_loss", note=PER_EXAMPLE),
    **lost("ref_pretrain"),
    **unneeded("micro_train_batch_size", "batch.tokens"),
    **unneeded("packing_samples", "always on"),
    **unneeded("gradient_checkpointing", "model.recompute"),
    **unneeded(
        "attn_implementation deepcompile disable_ds_ckpt disable_fast_tokenizer disable_trace_cache"
        " flash_attn grad_accum_dtype gradient_checkpointing_use_reentrant"
        " local_rank overlap_comm ring_head_stride save_hf_ckpt"
        " use_ds_universal_ckpt use_liger_kernel use_ms wandb_group wandb_org"
        " wandb_project wandb_run_name"
    ),
}
SFT = {
    "pretrain_mode": to("sft.train_on", {True: "everything"}, off=(None, False)),
    "multiturn": Rule(kind="unneeded", note=TURNS),
}
DPO = {
    "beta": to("dpo.beta"),
    "ipo": to("dpo.loss", {True: "ipo_sum"}, off=(None, False)),
    "label_smoothing": to("dpo.label_smoothing", off=(None, 0)),
    "nll_loss_coef": to("dpo.sft", off=(None, 0)),
}
RM = {
    "loss": Rule(values={"sigmoid": {}, "logexp": {}}),
    "margin_loss": to("rm.margin", {True: 1.0, False: 0.0}),
    **unneeded("compute_fp32_loss value_head_prefix"),
}
KTO = {
    "beta": to("kto.beta"),
    "desirable_loss_weight": to("kto.desirable_weight"),
    "undesirable_loss_weight": to("kto.undesirable_weight"),
}
KD = {
    "teacher_model": to("kd.teacher"),
    **read("kd_coef", "kd.sft", "it is the weight of the divergence; kd.sft is 1 minus it"),
    "teacher_offload": FROZEN,
    **lost("pretrain_mode"),
}
PRM = {
    "placeholder_token": to("prm.placeholder"),
    "reward_tokens": to("prm.reward_tokens", note="the first is that of a right step"),
}
SHARED: dict[str, Any] = {
    "train_batch_size": 128,
    "max_epochs": 1,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
    "l2": 0.0,
    "adam_betas": [0.9, 0.95],
    "max_norm": 1.0,
    "seed": 42,
    "param_dtype": "bf16",
    "zero_stage": 2,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
}
OPENRLHF = Project(
    title="OpenRLHF",
    version="0.9.3",
    command=r"openrlhf\.cli\.train_(\w+)",
    keys=KEYS,
    defaults=SHARED,
    variants={
        "sft": Variant(
            trainer="sft",
            keys=SFT,
            defaults={"learning_rate": 5e-6, "max_epochs": 2, "max_len": 2048},
        ),
        "dpo": Variant(
            trainer="dpo",
            keys=DPO,
            defaults={"learning_rate": 1e-5, "beta": 0.1, "max_len": 512},
            settings={"dpo.loss": "sigmoid"},
        ),
        "rm": Variant(
            trainer="rm",
            keys=RM,
            defaults={"learning_rate": 9e-6, "max_len": 512, "margin_loss": False},
        ),
        "kto": Variant(
            trainer="kto",
            keys=KTO,
            defaults={"learning_rate": 1e-5, "beta": 0.01, "max_len": 2048},
        ),
        "kd": Variant(
            trainer="kd",
            keys=KD,
            defaults={"learning_rate": 5e-6, "kd_coef": 0.4, "max_len": 2048},
            settings={"kd.loss": "forward_kl"},
        ),
        "prm": Variant(
            trainer="prm",
            keys=PRM,
            defaults={"learning_rate": 1e-6, "max_len": 2048},
            settings={"prm.formulation": "token"},
        ),
    },
)
