"""``load_safetensors``: every part of every tensor reaches the device that holds it, or nothing is placed."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dtorch
from dtorch.client import graph
from dtorch.client.weights import load_safetensors
from dtorch.core.errors import LoadError
from tests.engine.helpers import S0, S1, P, R, both_modes, mesh
from tests.loading.conftest import equal


def last(name: str, shape: tuple[int, ...]) -> list[Any]:
    """Cut along the first axis of the mesh by the last dimension."""
    return [dtorch.Shard(len(shape) - 1) if shape else R, R]


def both(name: str, shape: tuple[int, ...]) -> list[Any]:
    return [S0, dtorch.Shard(len(shape) - 1)] if shape else [R, P]


@both_modes
@pytest.mark.parametrize("placements", [None, last, both], ids=["replicated", "last", "both"])
def test_values_and_placements(mode, file, values, placements):
    on = mesh(2, 2)
    loaded = load_safetensors(file, on, placements)
    assert set(loaded) == set(values)
    for name, want in values.items():
        wanted = placements(name, tuple(want.shape)) if placements else [R, R]
        assert list(loaded[name].placements) == wanted
        assert equal(loaded[name], want), name
    for position in range(4):  # each device holds just its part
        here = loaded["rows"].to_local(position)
        rows = torch.chunk(values["rows"], 2, 0)[position // 2] if placements is both else values["rows"]
        by = {None: (0, 1), last: (position // 2, 2), both: (position % 2, 2)}[placements]
        assert equal(here, torch.chunk(rows, by[1], 1)[by[0]])


@both_modes
def test_conversion(mode, file, values):
    loaded = load_safetensors(file, mesh(2), lambda name, shape: [S0] if shape else None, dtype=torch.bfloat16)
    for name, want in values.items():
        assert equal(loaded[name], want.bfloat16() if want.is_floating_point() else want), name


def test_placements_by_name(file, values):
    loaded = load_safetensors(str(file), mesh(2), {"rows": [S1], "small": [S0]})
    assert loaded["rows"].placements == (S1,)
    assert loaded["small"].placements == (S0,)
    assert loaded["cube"].placements == (R,)
    with mesh(3):
        assert load_safetensors(file)["rows"].device_mesh.devices == (0, 1, 2)


@both_modes
def test_what_is_loaded_can_be_changed(mode, file, values):
    on = mesh(2)
    first = load_safetensors(file, on)["rows"]
    first.add_(1)
    assert equal(first, values["rows"] + 1)
    assert equal(load_safetensors(file, on)["rows"], values["rows"])


@pytest.fixture
def shards(tmp_path: Path, values: dict[str, torch.Tensor]) -> Path:
    """The tensors in two files with an index."""
    names = list(values)
    weight_map = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: values[n] for n in names if weight_map[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_directory_and_index(shards, file, values):
    for path in (shards, shards / "model.safetensors.index.json", file.parent):
        loaded = load_safetensors(path, mesh(1))
        assert set(loaded) == set(values)
        assert equal(loaded["cube"], values["cube"])


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def cut_in_the_middle(path: Path) -> str:
    os.truncate(path, path.stat().st_size - 1000)
    return r"model\.safetensors was cut off: '\w+' ends at byte \d+, and the file has \d+"


def cut_in_the_header(path: Path) -> str:
    os.truncate(path, 100)
    return r"model\.safetensors is no safetensors file, or was cut off"


def cut_to_nothing(path: Path) -> str:
    os.truncate(path, 0)
    return r"model\.safetensors is no safetensors file, or was cut off"


def wrong_shape(path: Path) -> str:
    header, data = header_of(path)
    header["rows"]["shape"][0] += 1
    write(path, header, data)
    return r"model\.safetensors: 'rows' of shape \(701, 501\) and type F32 cannot lie at bytes \d+ to \d+"


def wrong_offsets(path: Path) -> str:
    header, data = header_of(path)
    header["rows"]["data_offsets"] = [-4, header["rows"]["data_offsets"][1]]
    write(path, header, data)
    return r"'rows' of shape \(700, 501\) and type F32 cannot lie"


def unknown_type(path: Path) -> str:
    header, data = header_of(path)
    header["rows"]["dtype"] = "F3"
    write(path, header, data)
    return r"model\.safetensors: the header's entry for 'rows' cannot be used: .*F3"


def no_entry(path: Path) -> str:
    write(path, {"rows": 3}, b"")
    return "the header's entry for 'rows' cannot be used"


def no_table(path: Path) -> str:
    write(path, [1, 2], b"")
    return "its header is no table"


def no_json(path: Path) -> str:
    write(path, b"\xff{{", b"")
    return "its header is not JSON"


def missing(path: Path) -> str:
    path.unlink()
    return r"model\.safetensors cannot be read: No such file"


def a_directory(path: Path) -> str:
    path.unlink()
    path.mkdir()
    return "must hold one safetensors file or one index of several, and holds none"


DAMAGES = [
    cut_in_the_middle, cut_in_the_header, cut_to_nothing, wrong_shape, wrong_offsets, unknown_type, no_entry, no_table,
    no_json, missing, a_directory,
]  # fmt: skip


def nothing_is_placed() -> bool:
    """Whether an inline session's worker holds no tensor."""
    return not graph.current_session().link._executor.store  # type: ignore[attr-defined]


@pytest.fixture
def empty_session(mode: str) -> None:
    dtorch.shutdown()
    dtorch.init(mode="inline")
    mesh(1)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_file_is_one_error(empty_session, tmp_path, file, damage):
    path = Path(shutil.copy(file, tmp_path))
    text = damage(path)
    with pytest.raises(LoadError, match=text) as caught:
        load_safetensors(path, mesh(1))
    assert isinstance(caught.value, OSError)
    assert str(path) in str(caught.value)
    assert nothing_is_placed()


def test_a_damaged_shard_is_one_error(empty_session, shards):
    index = shards / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["ghost"] = "model-1.safetensors"
    index.write_text(json.dumps(table))
    with pytest.raises(LoadError, match=r"model-1\.safetensors has no tensor 'ghost', which model\.safetensors\.index"):
        load_safetensors(shards, mesh(1))
    (shards / "model-2.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-2\.safetensors cannot be read: No such file"):
        load_safetensors(shards, mesh(1))
    for text in ("{}", "[]", "nothing", '{"weight_map": [1]}'):
        index.write_text(text)
        with pytest.raises(LoadError, match="is no index of safetensors files"):
            load_safetensors(shards, mesh(1))
    with pytest.raises(LoadError, match="does not exist"):
        load_safetensors(shards / "other.json", mesh(1))
    assert nothing_is_placed()


def test_placements_that_do_not_fit(empty_session, file):
    with pytest.raises(ValueError, match="no tensor 'rwos' to place"):
        load_safetensors(file, mesh(1), {"rwos": [S0]})
    with pytest.raises(ValueError, match="3 faults.*'scalar' of shape"):
        load_safetensors(file, mesh(1), {"rwos": [S0], "scalar": [S0], "rows": [dtorch.Shard(2)]})
    assert nothing_is_placed()


@both_modes
def test_a_file_that_changes_while_it_is_loaded(mode, tmp_path, values):
    path = tmp_path / "x.safetensors"
    save_file({"rows": values["rows"]}, path)
    on = mesh(2)
    files = graph.session_of(on).files
    load_safetensors(path, on)  # the workers have it open
    dtorch.synchronize()
    session, spec = graph.session_of(on), dtorch.zeros(700, 501, device_mesh=on, placements=[S1])._h.spec
    with files._lock:  # so that it stays open
        entry = files._opened(str(path))
        stored = os.stat(path)
        with open(path, "r+b") as f:
            f.seek(1000)
            f.write(b"changed")
        os.utime(path, ns=(stored.st_atime_ns, stored.st_mtime_ns + 1000))
        where = load_safetensors.__code__, 0
        files._emit(session.ids(), spec, entry, 8, torch.float32, "'rows' from there", where)
    with pytest.raises(OSError, match=r"loading 'rows' from there failed .* was changed while it was being loaded"):
        dtorch.synchronize()
    assert equal(load_safetensors(path, on)["rows"], load_file(path)["rows"])  # again, as it is now
