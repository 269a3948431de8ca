"""Make the folder of a student without weights for a small teacher of the Llama family: the
teacher's tokenizer, and its configuration with fewer and narrower layers.

    python benchmarks/small_student.py DATA/models/stories260K-hf FOLDER

`rlhf run kd benchmarks/real_kd.yaml --model FOLDER` builds the weights from it (100,944 parameters
for stories260K).
"""

import argparse
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}


def make(teacher: Path, folder: Path) -> None:
    """Write config.json and the tokenizer."""
    AutoConfig.from_pretrained(teacher, **SHAPE).save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    make(options.teacher, options.folder)
