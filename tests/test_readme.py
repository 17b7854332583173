"""The README says what is true: its Python blocks run, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small language model with a tokenizer, in transformers' folder format."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", "<unk>", "Once", "upon", "a", "time"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_blocks_run(number: int, model_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "test.py"
    script.write_text(BLOCKS[number].replace('"DIR"', repr(str(model_folder))), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "make demo" in TEXT
    assert "make test" in TEXT
    assert re.search(r"^demo:", makefile, re.MULTILINE)
    assert re.search(r"^test:", makefile, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "dtorch.cli", "--help"], check=False, capture_output=True, text=True, timeout=60
    )
    for command in set(re.findall(r"dtorch (\w+)", TEXT)) & {"run", "info", "models", "exec", "generate"}:
        assert command in done.stdout
