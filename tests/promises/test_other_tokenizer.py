"""A trainer of third parties distils from a teacher with another tokenizer, as docs/kd.md says."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlhf_devkit import TrainerConformance, column
from rlhf_devkit.conformance import bench_of
from rlhf_devkit.tiny import make_model

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "third_parties" / "likelihoods.py"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def teacher_in(folder: Path) -> Path:
    """A model whose tokens are bytes and an end, with another chat template."""
    make_model(folder, seed=3)
    for path in folder.glob("*token*"):
        path.unlink()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = {letter: number for number, letter in enumerate([*alphabet, "</s>"])}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>", model_max_length=512
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def logprob_of(folder: Path, prompt: str, answer: str) -> float:
    """The teacher's log-likelihood of an answer with its end, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = tokenizer(f"user: {prompt}</s>assistant: ")["input_ids"]
    tokens = torch.tensor([*before, *tokenizer(f"{answer}</s>")["input_ids"]])
    with torch.no_grad():
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)
    of_answer = range(len(before), len(tokens))
    return sum(float(logprobs[n - 1, tokens[n]]) for n in of_answer)


def test_a_teacher_reads_the_answers_in_its_own_tokens_and_the_student_approaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))

    class Kit(TrainerConformance):
        trainer = f"{FILE}:Likelihoods"
        words = ("--likelihoods.teacher", str(teacher_in(tmp_path / "teacher")))
        clip = "0"

    bench = bench_of(Kit, tmp_path / "bench")
    metrics = bench.plain()
    rows = map(json.loads, (tmp_path / "bench" / "eval.jsonl").read_text().splitlines())
    texts = [[message["content"] for message in row["messages"]] for row in rows]
    known = [logprob_of(tmp_path / "teacher", prompt, answer) for prompt, answer in texts]
    assert metrics[-1]["eval/teacher"] == pytest.approx(sum(known) / len(known), rel=1e-5)
    losses = column(metrics, "loss")
    assert losses[-1] < losses[0] / 2
    assert column(bench.run("two ranks", 2), "loss") == pytest.approx(losses, rel=1e-4)
    Kit().test_packed_equals_separate_in_loss_and_gradients(bench)


def test_the_trainer_of_the_page_is_the_one_that_is_tested() -> None:
    assert f"```python\n{FILE.read_text()}```" in (ROOT / "docs" / "kd.md").read_text()
