"""What vLLM answers: the Python of an environment with vLLM runs `python vllm_answers.py FILE`,
which reads models and their prompts from FILE and adds tokens and log-probabilities to it."""

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest


def answers(served: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each prompt its tokens with those of the most likely answer, and the
    log-probabilities of the last of them: with an adapter of the answer, else of all but one."""
    adapter = served.get("adapter")
    llm = LLM(
        served["model"], dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4,
        enable_prefix_caching=False, distributed_executor_backend="uni", skip_mm_profiling=True,
        enable_lora=adapter is not None, limit_mm_per_prompt={"image": 2},
    )  # fmt: skip
    # With adapters, vLLM 0.32 has no log-probabilities of prompts on a CPU.
    sampling = SamplingParams(
        max_tokens=6, temperature=0, logprobs=0, prompt_logprobs=None if adapter else 0
    )
    outputs = llm.generate(
        [prompt_of(**prompt) for prompt in served["prompts"]], sampling,
        lora_request=LoRARequest("adapter", 1, adapter) if adapter else None,
    )  # fmt: skip
    found = []
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        places = [*(output.prompt_logprobs or [])[1:], *output.outputs[0].logprobs]
        read = zip(tokens[-len(places) :], places, strict=True)
        found.append({"tokens": tokens, "logprobs": [at[token].logprob for token, at in read]})
    del llm
    cleanup_dist_env_and_memory()
    return found


def prompt_of(text: str, images: list[str]) -> dict[str, Any]:
    """Return a prompt with the pictures in files."""
    opened = [Image.open(image) for image in images]
    return {"prompt": text, **({"multi_modal_data": {"image": opened}} if opened else {})}


if __name__ == "__main__":
    file = Path(sys.argv[1])
    models = json.loads(file.read_text())
    for served in models.values():
        served["found"] = answers(served)
        file.write_text(json.dumps(models))
