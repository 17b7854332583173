"""Keys, tokens, options and places, without any process."""

from __future__ import annotations

import pytest

from dtorch.cluster import keys, tokens
from dtorch.cluster.options import ControllerOptions, WorkerOptions, checked, seconds
from dtorch.cluster.places import Machine, Place, choose, count
from dtorch.core.errors import DtorchError


def test_keys_are_their_owners_alone(tmp_path):
    made = keys.make(tmp_path / "keys")
    assert {p.name for p in made} == {
        "server.key", "server.pub", "token.key", "client.key", "client.pub", "worker.key", "worker.pub"
    }  # fmt: skip
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in made)
    assert keys.pair(tmp_path / "keys", "client").public == keys.public(tmp_path / "keys", "client")
    with pytest.raises(keys.KeyFileError, match=r"server\.key is there already"):
        keys.make(tmp_path / "keys")
    for name in ("../x", "client-", "client--a", "client-a\n"):
        with pytest.raises(keys.KeyFileError, match="begins with client or worker"):
            keys.make(tmp_path / "keys", (name,))
    keys.make(tmp_path / "keys", ("client-laptop",))
    assert len(keys.allowed(tmp_path / "keys", "client")) == 2
    (tmp_path / "keys" / "worker.key").chmod(0o644)
    with pytest.raises(keys.KeyFileError, match="can be read by others: chmod 600"):
        keys.pair(tmp_path / "keys", "worker")


def test_a_token_is_what_was_signed(tmp_path):
    keys.make(tmp_path)
    text = tokens.issue(tmp_path, 60, "me")
    assert tokens.check(tmp_path, text).name == "me"
    body, _, signature = text.partition(".")
    for forged in (f"{body}.", body, f"{body[:-2]}AA.{signature}", f"{body}.{signature}é", "." * 9000, f"{body}.é"):
        with pytest.raises(tokens.TokenError):
            tokens.check(tmp_path, forged)
    with pytest.raises(tokens.TokenError, match="on one line"):
        tokens.issue(tmp_path, 60, "me\nand you")
    assert tokens.revoke(tmp_path, text) in tokens.revoked(tmp_path)
    with pytest.raises(tokens.TokenError, match="was revoked"):
        tokens.check(tmp_path, text)


def test_options(tmp_path):
    options = checked(
        WorkerOptions, controller="tcp://host:1", keys=tmp_path, devices="cuda:0,2", memory="8GiB", scratch=None
    )
    assert options.devices == ("cuda:0", "cuda:2")
    assert options.memory == 8 << 30
    assert options.file_roots == ()
    assert checked(WorkerOptions, controller="tcp://[::1]:1", keys=tmp_path, devices="cpu:2").devices == (
        "cpu:0",
        "cpu:1",
    )
    for wrong in (
        {"controller": "ipc://x"}, {"controller": "host:1"}, {"devices": "cpu"}, {"devices": "cuda:0,0"}, {"devices": "cpu:0"},
        {"keys": tmp_path / "none"}, {"memory": "8 apples"}, {"tensors": 0}, {"unknown": 1},
    ):  # fmt: skip
        with pytest.raises(DtorchError):
            checked(WorkerOptions, **{"controller": "tcp://host:1", "keys": tmp_path, "devices": "cpu:1", **wrong})
    with pytest.raises(DtorchError, match="tcp://HOST:PORT"):
        checked(ControllerOptions, listen="tcp://nowhere", keys=tmp_path)
    assert (seconds("7d"), seconds("90s")) == (604800, 90)
    with pytest.raises(DtorchError):
        seconds("soon")


def test_places():
    near = {1: Machine("a", "127.0.0.1", ("cpu:0", "cpu:1")), 2: Machine("a", "127.0.0.1", ("cpu:0", "cuda:0"))}
    assert (count(near.values(), "cpu"), count(near.values(), "cuda"), count(near.values(), "xpu")) == (3, 1, 0)
    own: list[Place] = []
    for _ in range(4):
        place = choose(near, "cpu", own, own, None, None)
        assert isinstance(place, Place)
        own.append(place)
    assert own == [Place(1, 0), Place(1, 1), Place(2, 0), Place(1, 0)]  # one machine first, then again
    assert choose(near, "cpu", [Place(1, 0)], [], None, None) == Place(1, 1)
    assert choose(near, "cpu", [], [], Place(2, 0), None) == Place(2, 0)
    assert "hosts a worker of this session already" in str(choose(near, "cuda", [], [Place(2, 1)], None, None))
    assert "no device of type 'xpu'" in str(choose(near, "xpu", [], [], None, None))
    far = {1: near[1], 3: Machine("b", "10.0.0.3", ("cpu:0",)), 4: Machine("c", "10.0.0.4", ("cpu:0",))}
    assert choose(far, "cpu", [], [], None, 3) == Place(3, 0)
    assert choose({3: far[3], 4: far[4]}, "cpu", [], [Place(3, 0)], None, 3) == Place(4, 0)
    assert "--data-address" in str(choose({3: far[3], **near}, "cuda", [], [], None, 3))
