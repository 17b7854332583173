"""Checks of a model's folder before anything is loaded from it, so that what is wrong is named by its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ModelInputError

INDEX_NAME = "model_index.json"


def check_folder(folder: Path, pipeline_name: str) -> None:
    """Refuse a folder that does not hold a whole pipeline of class `pipeline_name`.

    Reads the indices and the headers of the weight files, not the weights.

    Raises:
        ModelInputError: names the file that is missing, unreadable, cut short or of another model.
    """
    if not folder.is_dir():
        raise ModelInputError(f"there is no folder {folder}; pass --model a folder in diffusers format.")
    index_path = folder / INDEX_NAME
    if not index_path.is_file():
        raise ModelInputError(f"{folder} is no diffusers folder: it has no {INDEX_NAME}.")
    index = _read_json(index_path)
    found = index.get("_class_name")
    if found != pipeline_name:
        raise ModelInputError(f"{index_path} is for {found}, not {pipeline_name}; name the model that it belongs to.")
    for name, description in index.items():
        if isinstance(description, list) and any(description):  # [null, null] stands for a part left out
            _check_component(folder / name)


def check_text_folder(folder: Path) -> None:
    """Refuse a folder that does not hold a whole causal language model of transformers and its tokenizer.

    Raises:
        ModelInputError: names what is missing, unreadable or cut short.
    """
    if not folder.is_dir():
        raise ModelInputError(f"there is no folder {folder}; pass --model a folder in transformers format.")
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ModelInputError(f"{folder} is no transformers folder: it has no config.json.")
    _read_json(config_path)
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        raise ModelInputError(f"{folder} has no tokenizer; copy its files (tokenizer.json and others) there as well.")
    check_weights(folder)


def _check_component(component: Path) -> None:
    if not component.is_dir():
        raise ModelInputError(f"{component} is missing, though {INDEX_NAME} names it; copy the whole model again.")
    check_weights(component)


def check_weights(component: Path) -> None:
    """Refuse a folder with a `config.json` whose safetensors files are not all there and whole.

    Raises:
        ModelInputError: names the file.
    """
    for index_path in sorted(component.glob("*.safetensors.index.json")):
        shards = _read_json(index_path).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelInputError(f"{index_path} has no weight_map; copy the file again.")
        for shard in sorted(set(map(str, shards.values()))):
            if not (component / shard).is_file():
                raise ModelInputError(f"{component / shard} is missing; copy the file again.")
    weights = sorted(component.glob("*.safetensors"))
    if not weights and (component / "config.json").is_file():  # schedulers and tokenizers name theirs otherwise
        raise ModelInputError(f"{component} has no weights in safetensors format; no other format is read.")
    for path in weights:
        _check_safetensors(path)


def _check_safetensors(path: Path) -> None:
    """Reading the header compares the size that it promises with the size of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            return
    except (SafetensorError, OSError) as error:
        raise ModelInputError(f"{path} is damaged or cut short ({error}); copy the file again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelInputError(f"{path} cannot be read as JSON ({error}); copy the file again.") from error
    if not isinstance(value, dict):
        raise ModelInputError(f"{path} does not hold a JSON object; copy the file again.")
    return value
