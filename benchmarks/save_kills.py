"""Kills a training program at random moments of its asynchronous saves, and lets another go on from what is there.

Each run trains a small model with dropout, saving after every step without waiting. At a random moment the program, its
controller or one of its workers is killed (SIGKILL). After the loss of a worker the program goes on by itself; else a new
one loads the last complete checkpoint. All losses, and the last checkpoint, must have the bits of an uninterrupted run.

    python benchmarks/save_kills.py --runs 30 [--mode inline] [--kill client|controller|worker]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import dtorch

STEPS = 8
LARGE = 1 << 20  # elements of a tensor that makes a save take a while
fork = multiprocessing.get_context("fork")


class Batches:
    """The data, and how far it has been read."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> torch.Tensor:
        self.position += 1
        return torch.randn(6, 8, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def begin(mode: str) -> dict[str, Any]:
    """A session, and what is trained in it."""
    torch.set_num_threads(1)
    dtorch.init(mode=mode, **({"workers": 2, "threads": 1} if mode == "local" else {}))
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
    model = dtorch.parallelize(model, mesh, zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "step": 0, "model": model, "optimizer": optimizer, "batches": Batches(), "random": dtorch.RandomState(),
        "schedule": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        "large": dtorch.zeros(LARGE, device_mesh=mesh, placements=[dtorch.Shard(0)]),
    }  # fmt: skip


def warm_up() -> None:
    """Import here, once, what programs import; without backward, after which no process can be forked that calls it."""
    state = begin("inline")
    state["model"](next(state["batches"]).to("dtorch"))
    for p in state["model"].parameters():
        p.grad = torch.zeros_like(p)
    state["optimizer"].step()
    with tempfile.TemporaryDirectory() as folder:
        dtorch.save(state, f"{folder}/checkpoint", blocking=True)
        dtorch.load(f"{folder}/checkpoint", into=state)
    dtorch.shutdown()


def program(directory: str, mode: str, out: Connection) -> None:
    """Train to the end, from the last checkpoint if there is one; sends (step, loss) and the processes' ids."""
    state = begin(mode)
    model, optimizer = state["model"], state["optimizer"]
    if Path(directory).exists():
        dtorch.load(directory, into=state)
    session = model[0].weight._h.session
    pids = {"client": [os.getpid()], "worker": [w.pid for w in dtorch.workers()] if mode == "local" else []}
    pids["controller"] = [session.link._link._process.pid] if mode == "local" else []
    out.send(pids)
    while state["step"] < STEPS:
        loss = model(next(state["batches"]).to("dtorch")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["schedule"].step()
        state["large"].add_(1)
        state["step"] += 1
        out.send((state["step"], float(loss.detach())))
        dtorch.save(state, directory)
    dtorch.shutdown()


def run(directory: str, mode: str, target: str | None = None, delay_s: float = 0.0) -> tuple[dict[int, float], float, bool]:
    """Losses by step, how long that took, and whether the program ended well. ``target`` is killed ``delay_s`` after the
    first step."""
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=program, args=(directory, mode, sender))
    child.start()
    sender.close()
    losses: dict[int, float] = {}
    pids: dict[str, list[int]] = {}
    kill_at, first_s = None, 0.0
    try:
        while True:
            wait_s = None if kill_at is None else max(0.0, kill_at - time.monotonic())
            if not receiver.poll(wait_s):
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(random.choice(pids[target or "client"]), signal.SIGKILL)
                kill_at = target = None
                continue
            message = receiver.recv()
            if isinstance(message, dict):
                pids = message
                continue
            losses[message[0]] = message[1]
            first_s = first_s or time.monotonic()
            if target is not None and kill_at is None:
                kill_at = time.monotonic() + delay_s
    except EOFError:
        child.join()
    return losses, time.monotonic() - first_s, child.exitcode == 0


def interrupted(want: dict[int, float], mode: str, target: str, delay_s: float) -> tuple[bool, int]:
    """One run with a kill: whether it left a save half done, and from which step a new program went on."""
    with tempfile.TemporaryDirectory() as folder:
        directory = f"{folder}/checkpoint"
        losses, _, well = run(directory, mode, target, delay_s)
        assert well or target != "worker", "a worker was lost, and the program did not go on"
        half = bool(list(Path(folder).glob(".checkpoint.saving-*")))
        again: dict[int, float] = {}
        if not well:
            again, _, well = run(directory, mode)
        assert well, f"{target} was killed, and the program could not go on"
        both = {**losses, **again}
        wrong = {k: (v, want[k]) for part in (losses, again) for k, v in part.items() if v != want[k]}
        assert both.keys() == want.keys() and not wrong, f"after {target} was killed: {wrong or sorted(both)}"
        assert sorted(os.listdir(folder)) == ["checkpoint"], os.listdir(folder)
        dtorch.init(mode="inline")
        last = dtorch.load(directory, device_mesh=dtorch.init_device_mesh("cpu", (1,)))
        assert last["step"] == STEPS and torch.equal(last["large"].to_torch(), torch.full((LARGE,), float(STEPS)))
        dtorch.shutdown()
        return half, min(again, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--mode", choices=("inline", "local"), default="local")
    parser.add_argument("--kill", choices=("client", "controller", "worker"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    targets = [arguments.kill] if arguments.kill else ["client", "controller", "worker"]
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        want, whole_s, well = run(f"{folder}/checkpoint", arguments.mode)
    assert well and len(want) == STEPS
    halves = 0
    for number in range(arguments.runs):
        target = "client" if arguments.mode == "inline" else targets[number % len(targets)]
        half, first = interrupted(want, arguments.mode, target, random.uniform(0, whole_s))
        halves += half
        print(f"run {number + 1}: {target} killed, {'amid a save, ' if half else ''}"
              f"{f'resumed at step {first}' if first else 'went on'}", flush=True)  # fmt: skip
    print(f"{arguments.runs} runs, {halves} of them left a save half done; every loss and checkpoint is right")


if __name__ == "__main__":
    main()
