"""TRL: arguments of `trl sft`, `trl dpo` and so on, and of its example scripts."""

from typing import Any

from rlhf_migrate.foreign.project import Project, Rule, Variant, lost, read, to, unneeded
from rlhf_migrate.foreign.transformers import (
    DEFAULTS,
    LORA,
    PACKING,
    PER_EXAMPLE,
    TRANSFORMERS,
)

LOSSES = {
    name: name
    for name in (
        *("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair"),
        *("sppo_hard", "apo_zero", "apo_down", "discopop", "sft"),
    )
}
WHOLE_ROW = "only the whole length is limited here, by data.max_tokens"

KEYS: dict[str, Rule] = {
    **TRANSFORMERS,
    "model_name_or_path": to("model.path"),
    "model_revision": to("model.revision", off=(None, "", "main")),
    "trust_remote_code": to("model.trust_remote_code", off=(None, False)),
    "use_peft": to("lora"),
    "lora_r": to("lora.rank"),
    "lora_alpha": to("lora.alpha"),
    "lora_dropout": to("lora.dropout"),
    "lora_target_modules": to("lora.targets"),
    "lora_target_parameters": to("lora.parameters"),
    **LORA,
    "lora_modules_to_save": to("lora.modules_to_save"),
    "load_in_4bit": to("model.quantize", {True: "nf4"}, off=(None, False)),
    **read("train_dataset dataset_name dataset_config dataset_train_split datasets", "data.train"),
    **read("dataset_test_split", "data.eval"),
    "dataset_num_proc": to("data.processes"),
    "max_length": to("data.max_tokens"),
    "max_seq_length": to("data.max_tokens"),
    "truncation_mode": Rule(values={"keep_start": {}}, off=(None, "")),
    "chat_template_path": to("data.chat_template", note="this must be a Jinja file here"),
    "router_aux_loss_coef": to("model.router_loss", note=PER_EXAMPLE),
    **lost("max_prompt_length max_completion_length max_target_length", WHOLE_ROW),
    **lost("load_in_8bit eos_token pad_token test_split_size"),
    **unneeded("dtype torch_dtype", "model.dtype"),
    **unneeded(
        "accelerate_config activation_offloading attn_implementation bnb_4bit_quant_storage"
        " bnb_4bit_quant_type config dataset_streaming disable_dropout env"
        " generate_during_eval ignore_bias_buffers lora_task_type model_init_kwargs"
        " num_processes pad_to_multiple_of padding_free padding_value"
        " precompute_ref_batch_size streaming use_bnb_nested_quant"
    ),
}
SFT = {
    "assistant_only_loss": to("sft.train_on", {True: "answers", False: "everything"}),
    "completion_only_loss": to("sft.train_on", {True: "answers", False: "everything"}),
    **read("packing", "always on", PACKING),
    "loss_type": Rule(values={"nll": {}, "chunked_nll": {}}),
    **read("dataset_text_field", note="rename the column with `columns` of data.train"),
    **lost("dataset_kwargs"),
    **unneeded("packing_strategy eval_packing shuffle_dataset"),
}
DPO = {
    **read("sync_ref_model ref_model_sync_steps", "dpo.reference_every"),
    **read("ref_model_mixup_alpha", "dpo.reference_mix"),
    "beta": to("dpo.beta"),
    "loss_type": to("dpo.loss", LOSSES),
    **read("loss_weights", "dpo.loss"),
    "rpo_alpha": to("dpo.sft"),
    "label_smoothing": to("dpo.label_smoothing", off=(None, 0)),
    "discopop_tau": to("dpo.discopop_tau", off=(None, 0.05)),
    "f_divergence_type": Rule(values={"reverse_kl": {}}),
    **lost("ld_alpha use_weighting ref_model_name_or_path"),
    **unneeded("f_alpha_divergence_coef precompute_ref_log_probs"),
}
KTO = {
    "beta": to("kto.beta"),
    "loss_type": to("kto.loss", {name: name for name in ("kto", "apo_zero_unpaired")}),
    "desirable_weight": to("kto.desirable_weight"),
    "undesirable_weight": to("kto.undesirable_weight"),
    **lost("sync_ref_model"),
    **unneeded("precompute_ref_log_probs ref_model_mixup_alpha ref_model_sync_steps"),
}
CPO = {
    "beta": to("dpo.beta"),
    "loss_type": to("dpo.loss", {"sigmoid": "cpo", "simpo": "simpo"}),
    "cpo_alpha": to("dpo.sft"),
    "simpo_gamma": to("dpo.gamma"),
    "label_smoothing": to("dpo.label_smoothing", off=(None, 0)),
    **lost("alpha"),
}
GKD = {
    **{key: rule for key, rule in SFT.items() if not key.endswith("only_loss")},
    "teacher_model_name_or_path": to("kd.teacher"),
    "teacher_model_revision": to("kd.teacher_revision"),
    "beta": to("kd.beta"),
    "lmbda": to(
        "kd.on_policy", note="there the share of steps, here the share of the rows in every step"
    ),
    "seq_kd": to("kd.teacher_answers", {True: 1.0}, off=(None, False)),
    "temperature": to(
        "kd.sampling_temperature", note="TRL does not apply it to the logits of the loss either"
    ),
    "max_new_tokens": to("kd.max_new_tokens"),
    **unneeded("teacher_model_init_kwargs"),
}
PRM = {
    "step_separator": to("prm.separator"),
    "train_on_last_step_only": to("prm.steps", {True: "last", False: "all"}),
}
DATA_SET = {
    **read("path name data_dir data_files split", "data.train"),
    **read("columns", note="all columns are read here; remove the others from the rows"),
}
SHARED: dict[str, Any] = {
    **DEFAULTS,
    "bf16": True,
    "max_length": 1024,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
}
PREFERENCE: dict[str, Any] = {"learning_rate": 1e-6, "beta": 0.1}
TRL = Project(
    title="TRL",
    version="1.16",
    command=r"(?:^|\s)trl\s+(\w+)|scripts/(\w+)\.py|(?:^|/|\s)(sft|dpo|kto|reward)\w*\.py",
    keys=KEYS,
    defaults=SHARED,
    variants={
        "sft": Variant(
            trainer="sft",
            keys=SFT,
            defaults={"learning_rate": 2e-5, "assistant_only_loss": False},
        ),
        "dpo": Variant(
            trainer="dpo", keys=DPO, defaults=PREFERENCE, settings={"dpo.loss": "sigmoid"}
        ),
        "kto": Variant(trainer="kto", keys=KTO, defaults=PREFERENCE | {"loss_type": "kto"}),
        "reward": Variant(
            trainer="rm",
            keys={"center_rewards_coefficient": to("rm.centring", off=(None, 0))},
            defaults={"learning_rate": 1e-4},
        ),
        "gkd": Variant(
            trainer="kd",
            keys=GKD,
            defaults={
                "learning_rate": 2e-5,
                "beta": 0.5,
                "lmbda": 0.5,
                "temperature": 0.9,
                "max_new_tokens": 128,
            },
            settings={"kd.loss": "jsd"},
        ),
        "cpo": Variant(
            trainer="dpo",
            keys=CPO,
            defaults=PREFERENCE | {"loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5},
        ),
        "orpo": Variant(
            trainer="dpo",
            keys={"beta": to("dpo.beta")},
            defaults=PREFERENCE,
            settings={"dpo.loss": "orpo"},
        ),
        "prm": Variant(trainer="prm", keys=PRM, defaults={"learning_rate": 1e-5}),
    },
    data_set=DATA_SET,
)
