"""Programs on a pool: the same values as elsewhere, nothing of others, and what is lost comes back or is told."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

import dtorch
from dtorch.client import graph, wrap
from dtorch.core.errors import CommError, ControllerLostError, LoadError, RemoteError, WorkerLostError
from dtorch.protocol import commands as C
from tests.transport.processes import is_alive, wait_until

S0 = dtorch.Shard(0)


def mesh4():
    return dtorch.DeviceMesh("cpu", [0, 1, 2, 3])


def session():
    return graph.current_session()


def program():
    """Uploads, collectives over all devices, random numbers, a training step."""
    mesh = mesh4()
    torch.manual_seed(3)
    data = torch.randn(8, 50_000)
    x = dtorch.Tensor(data, device_mesh=mesh, placements=[S0])
    w = torch.nn.Parameter(dtorch.Tensor(torch.randn(50_000, 4), device_mesh=mesh, placements=[S0]))
    optimizer = torch.optim.SGD([w], lr=1e-3)
    losses = []
    for _ in range(3):
        loss = ((x @ w + dtorch.randn(8, 4, device_mesh=mesh, placements=[S0])) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert torch.equal(x.to_torch(), data)
    return losses, w.detach().to_torch()


def test_a_program_gives_the_same_bits(pool, monkeypatch):
    monkeypatch.setattr(wrap, "_PIECE_BYTES", 300_000)
    dtorch.shutdown()
    dtorch.init(mode="inline")
    expected = program()
    pool.connect()
    found = program()
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
    assert sorted(d for w in dtorch.workers() for d in w.devices) == [0, 1, 2, 3]


def test_a_script_needs_only_the_environment(pool, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import dtorch\nmesh = dtorch.DeviceMesh('cpu', [0, 1])\n"
        "x = dtorch.arange(6., device_mesh=mesh, placements=[dtorch.Shard(0)])\nprint((x * x).sum().item())\n"
    )
    given = {"DTORCH_ADDRESS": pool.address, "DTORCH_TOKEN": pool.token, "DTORCH_KEYS": str(pool.keys)}
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, **given}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "55.0\n", done.stderr


def test_sessions_see_nothing_of_each_other(pool):
    """Each has processes of its own: the number of another's tensor means nothing."""
    options = {"mode": "cluster", "address": pool.address, "token": pool.token, "keys": str(pool.keys)}
    first, second = dtorch.Graph(**options), dtorch.Graph(**options)
    with first:
        mine = dtorch.Tensor(torch.full((300_000,), 7.0), device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
        dtorch.synchronize()
    with second:
        theirs = dtorch.zeros(300_000, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
        dtorch.synchronize()
        wanted = second.session.fetch(mine._h.id + 1000, theirs._h.spec, [0])
        with pytest.raises(RemoteError):
            second.session.finish(wanted)
    pids = [{w.pid for w in s.session.workers.values()} for s in (first, second)]
    assert pids[0] and pids[1] and not pids[0] & pids[1]
    with first:
        assert torch.equal(mine.to_torch(), torch.full((300_000,), 7.0))
    assert len(pool.controllers()) == 2
    first.close()
    second.close()


def test_files_below_the_roots_alone(pool, tmp_path):
    inside, outside = pool.roots / "w.safetensors", tmp_path / "w.safetensors"
    value = torch.arange(400_000.0)
    for path in (inside, outside):
        save_file({"w": value}, path)
    pool.connect()
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    assert torch.equal(dtorch.client.weights.load_safetensors(inside, mesh, {"w": [S0]})["w"].to_torch(), value)
    with pytest.raises(LoadError, match="lies outside of the directories that workers may read"):
        dtorch.client.weights.load_safetensors(outside, mesh)


ATTACKS = {
    "an operator that reads files": lambda s, spec: s.send_plan(
        ["aten::from_file.default", spec.mesh.id, [], 0, ["/etc/passwd", False, 10], {}, [], [], [[s.spec_id(spec), None, False]],
         None, None, 0, [], []]
    ),
    "an operator of another namespace": lambda s, spec: s.send_plan(
        ["prim::Print.default", spec.mesh.id, [], 0, [], {}, [], [], [], None, None, 0, [], []]
    ),
    "another process's memory": lambda s, spec: s.buf.extend((C.MAP, 5, f"/proc/{os.getpid()}/fd/0")),
    "results into another's memory": lambda s, spec: s.buf.extend((C.FETCH, 99, 1, s.spec_id(spec), [0], "/proc/1/fd/3")),
    "more tensors than allowed": lambda s, spec: [wrap.empty(s, (1,), (1,), torch.float32, spec.mesh) for _ in range(2500)],
}  # fmt: skip


def test_attacks_end_the_session_and_nothing_else(pool):
    options = {"mode": "cluster", "address": pool.address, "token": pool.token, "keys": str(pool.keys)}
    other = dtorch.Graph(**options)
    with other:
        kept = dtorch.ones(3, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
        dtorch.synchronize()
    expected = ["not an operator", "not an operator", "shares no memory", "shares no memory", "this pool allows 2000"]
    for (name, attack), text in zip(ATTACKS.items(), expected, strict=True):
        one = dtorch.Graph(**options)
        with one, pytest.raises((WorkerLostError, RemoteError)) as told:
            x = dtorch.ones(2, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
            dtorch.synchronize()
            held = attack(one.session, x._h.spec)
            dtorch.synchronize()
            pytest.fail(f"{name} was let through: {held}")
        assert text in f"{told.value} {getattr(told.value, '__notes__', '')}", name
        one.close()
    with other:
        assert (kept + 1).to_torch().tolist() == [2, 2, 2]
    other.close()


def test_a_session_has_no_more_workers_than_places(pool):
    pool.connect()
    x = dtorch.Tensor(torch.arange(8.0), device_mesh=mesh4(), placements=[S0])
    assert (x + 1).sum().item() == 36
    session().link._link.add_worker([9], 1, {})
    with pytest.raises(WorkerLostError, match="has at most 4 workers"):
        while True:
            (x + 1).sum().item()


def test_a_message_that_is_too_long(pool):
    pool.connect()
    x = dtorch.ones(2, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
    dtorch.synchronize()
    with pytest.raises((CommError, WorkerLostError)):
        session().upload(session().ids(), x._h.spec, bytes(65 << 20))
        dtorch.synchronize()


def test_memory_that_is_not_there_fails_one_operator(pool):
    pool.connect()
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    with pytest.raises(RemoteError, match="allocate memory"):
        (dtorch.empty(20 << 30, dtype=torch.uint8, device_mesh=mesh) + 1).sum().item()
    assert dtorch.ones(2, device_mesh=mesh).sum().item() == 2


def test_a_killed_worker_is_replaced(pool):
    pool.connect()
    data = torch.randn(20_000)  # more than the client keeps a copy of
    x = dtorch.Tensor(data, device_mesh=mesh4(), placements=[S0])
    y = x + 1
    victim = dtorch.workers()[1].pid
    os.kill(victim, signal.SIGKILL)
    assert torch.equal((y * 2).to_torch(), (data + 1) * 2)
    assert victim not in [w.pid for w in dtorch.workers()]


class Cable:
    """A TCP connection between a client and the pool that can be cut."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self._to = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):  # the other side was faster
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            self.connections += 1
            self._ends += [near, far]
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, to: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)
        except OSError:
            return


def test_a_client_whose_connection_breaks_goes_on(pool):
    cable = Cable(pool.address)
    pool.connect(address=cable.address)
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    data = torch.randn(6_000_000)
    total = dtorch.zeros(6_000_000, device_mesh=mesh, placements=[S0])
    for step in range(6):
        total = total + dtorch.Tensor(data, device_mesh=mesh, placements=[S0])
        if step in (1, 4):
            cable.cut()
    expected = torch.zeros(6_000_000)
    for _ in range(6):
        expected = expected + data
    assert torch.equal(total.to_torch(), expected)
    assert cable.connections >= 2
    assert len(pool.controllers()) == 1
    dtorch.shutdown()
    cable.close()


def test_a_client_that_vanishes_is_cleaned_up_after(pool):
    pool.connect()
    x = dtorch.Tensor(torch.arange(5000.0), device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
    assert (x + 1).sum().item() == 12_502_500
    pids = [w.pid for w in dtorch.workers()] + pool.controllers()
    began_s = time.monotonic()
    os.kill(session().link._link._process.pid, signal.SIGKILL)
    with pytest.raises(ControllerLostError):
        (x + 1).sum().item()
    assert wait_until(lambda: not any(map(is_alive, pids)), 10), "something of a client that is gone is left"
    assert time.monotonic() - began_s < 10


def test_a_lost_machine_and_then_a_lost_controller(pool):
    """What the machine hosted goes on on the other one. Without a controller everybody ends."""
    pool.connect()
    data = torch.randn(20_000)  # more than the client keeps a copy of
    x = dtorch.Tensor(data, device_mesh=mesh4(), placements=[S0])
    assert torch.equal((x + 1).to_torch(), data + 1)
    pool.agents[0].kill()
    assert torch.equal((x * 2).to_torch(), data * 2)
    workers = [w.pid for w in dtorch.workers()]
    assert len(workers) == 4

    gate, pool.gate = pool.gate, pool.run("controller", "--listen", pool.address, "--message", "64M", "--sessions", "6")
    gate.kill()
    began_s = time.monotonic()
    with pytest.raises(ControllerLostError, match="has ended"):
        while True:
            (x + 1).to_torch()
    assert wait_until(lambda: not any(map(is_alive, workers)), 5 - (time.monotonic() - began_s))
    gate.stdout.close()
    pool.agents[0].wait()
    for path in pool.scratch.iterdir():  # of the machine that was killed
        shutil.rmtree(path)
    assert wait_until(lambda: not pool.controllers())
