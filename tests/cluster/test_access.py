"""Who gets in."""

from __future__ import annotations

import re
import shutil

import pytest

import dtorch
from dtorch.cli import info
from dtorch.cluster import bridge, keys, tokens
from dtorch.cluster.options import ConnectOptions
from dtorch.core.errors import CommError


def refused(pool, text, **other):
    options = ConnectOptions(**{"address": pool.address, "token": pool.token, "keys": pool.keys, **other})
    with pytest.raises(CommError, match=text):
        bridge.look(options)


def copy(pool, folder, **names):
    """A client's directory of keys, some of them under other names."""
    folder.mkdir()
    shutil.copy(pool.keys / "server.pub", folder)
    for name, source in names.items():
        shutil.copy(source, folder / f"{name}.key")
    return folder


def test_a_client_sees_the_pool(pool, monkeypatch):
    folder = copy(pool, pool.folder / "mine", client=pool.keys / "client.key")
    found = bridge.look(ConnectOptions(address=pool.address, token=pool.token, keys=folder))
    assert len(found.slots) == 4
    assert all(re.fullmatch(r"\S+ cpu:[01]: 0 workers", slot) for slot in found.slots)
    for name, value in (("ADDRESS", pool.address), ("TOKEN", pool.token), ("KEYS", str(pool.keys))):
        monkeypatch.setenv(f"DTORCH_{name}", value)
    facts = info._facts()
    assert (facts["mode"], facts["pool"]) == ("cluster", list(found.slots))


def test_without_a_known_key(pool, tmp_path):
    keys.make(tmp_path / "others")
    refused(pool, "does not know the key", keys=copy(pool, tmp_path / "a", client=tmp_path / "others" / "client.key"))
    refused(pool, "this key is not a client's", keys=copy(pool, tmp_path / "b", client=pool.keys / "worker.key"))
    with pytest.raises(keys.KeyFileError, match="no keys for a client"):
        bridge.look(ConnectOptions(address=pool.address, token=pool.token, keys=copy(pool, tmp_path / "c")))


def test_tokens(pool, tmp_path):
    keys.make(tmp_path / "others")
    refused(pool, "has expired", token=tokens.issue(pool.keys, -1))
    refused(pool, "not made by this pool", token=tokens.issue(tmp_path / "others", 3600))
    refused(pool, "is no token", token="x")
    body, _, signature = pool.token.partition(".")
    refused(pool, "not made by this pool", token=f"{body}.{signature[::-1]}")
    revoked = tokens.issue(pool.keys, 3600)
    tokens.revoke(pool.keys, revoked)
    refused(pool, "was revoked", token=revoked)


def test_a_revoked_token_ends_its_sessions(pool):
    token = tokens.issue(pool.keys, 3600)
    pool.connect(token=token)
    x = dtorch.ones(2, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
    assert x.sum().item() == 2
    tokens.revoke(pool.keys, tokens.read(token).id)
    with pytest.raises(CommError, match="was revoked"):
        while True:
            (x + 1).sum().item()


def test_connecting_says_why_not(pool):
    with pytest.raises(CommError, match="was not made by this pool"):
        pool.connect(token=pool.token[:-1] + ("a" if pool.token[-1] != "a" else "b"))
    with pytest.raises(CommError, match="no worker with a device of type 'cuda'"):
        pool.connect(device_type="cuda")
