"""Pipelines: micro-batches, schedules and tied weights give plain torch's values, in an order that lets stages overlap."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

import dtorch
from dtorch.client import graph
from dtorch.parallel import GPipe, Interleaved, OneForwardOneBackward, Schedule

IDS = torch.randint(3, 90, (8, 8), generator=torch.Generator().manual_seed(1))
PARTS = 4


def model(tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def placed(module: Any, layout: dict[str, int], **options: Any) -> Any:
    mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    return dtorch.parallelize(copy.deepcopy(module), mesh, **options)


class Clock:
    """A session's observer: when each stage would be done with what was issued, if every operator took one unit of time.

    Those that move a tensor meet: the giver goes on when the taker has it.
    """

    def __init__(self) -> None:
        self.moves: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.now: Counter[tuple[int, ...]] = Counter()
        self.work: Counter[tuple[int, ...]] = Counter()

    def ran(self, plan: Any, frame: Any) -> None:
        self.now[plan.mesh.devices] += 1
        self.work[plan.mesh.devices] += 1

    def moved(self, src: Any, dst: Any, steps: Any, frame: Any) -> None:
        if src.mesh is not dst.mesh:
            here, there = src.mesh.devices, dst.mesh.devices
            self.moves.append((here, there))
            self.now[here] = self.now[there] = max(self.now[here], self.now[there])

    @property
    def waiting(self) -> float:
        """Share of the stages' time in which they wait."""
        return 1 - sum(self.work.values()) / (len(self.work) * max(self.now.values()))


@contextmanager
def clock() -> Iterator[Clock]:
    session = graph.current_session()
    session.observer = found = Clock()
    try:
        yield found
    finally:
        session.observer = None


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 4}, {"dp": 2, "pp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_micro_batches(layout: dict[str, int]) -> None:
    plain = model().eval()
    parallel = placed(plain, layout, microbatches=PARTS)
    with torch.no_grad():
        want = plain(IDS).logits
        got = parallel(IDS).logits
    assert got.placements[0] == (dtorch.Shard(0) if "dp" in layout else got.placements[0])
    torch.testing.assert_close(got.to_torch(), want, rtol=1e-4, atol=1e-5)
    for rows in (1, 3):  # what does not divide runs in fewer parts
        with torch.no_grad():
            torch.testing.assert_close(parallel(IDS[:rows]).logits.to_torch(), want[:rows], rtol=1e-4, atol=1e-5)


def test_stages_hand_on_and_never_wait_for_later_ones() -> None:
    parallel = placed(model(tied=False).eval(), {"pp": 4}, microbatches=PARTS)
    session = graph.current_session()
    reads = session.reads
    with torch.no_grad(), clock() as found:
        parallel(IDS)
    assert session.reads == reads
    # Tensors of one micro-batch go from each stage to the next one only, and those of the next follow.
    assert {(b[0] - a[0]) for a, b in found.moves} == {1}
    steps = [a[0] for a, _ in found.moves]
    tensors = len(steps) // (3 * PARTS)
    assert steps == [stage for _ in range(PARTS) for stage in range(3) for _ in range(tensors)]


@pytest.mark.parametrize(("parts", "stages"), [(1, 2), (4, 2), (8, 2), (8, 4)])
def test_stages_work_at_once(parts: int, stages: int) -> None:
    parallel = placed(model(tied=False).eval(), {"pp": stages}, microbatches=parts)
    with torch.no_grad(), clock() as found:
        parallel(IDS)
    # The bubble of the textbook, (p - 1) / (m + p - 1); embedding and head make two stages longer than the others.
    assert found.waiting == pytest.approx((stages - 1) / (parts + stages - 1), abs=0.08)


@pytest.mark.parametrize("kind", [GPipe, OneForwardOneBackward])
def test_stages_work_at_once_in_training(kind: type[Schedule]) -> None:
    parallel = placed(model(tied=False), {"pp": 2})
    parts = IDS.chunk(8)
    with clock() as found:
        kind(2, 8).run(lambda i: parallel(parts[i], labels=parts[i], use_cache=False).loss / 8)
    assert found.waiting == pytest.approx(1 / 9, abs=0.08)


def test_generation_with_micro_batches_uses_its_cache() -> None:
    plain = model().eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
    want = plain.generate(IDS, **options)
    got = placed(plain, {"pp": 2}, microbatches=PARTS).generate(IDS.to("dtorch"), **options)
    assert torch.equal(got.to_torch(), want)


def test_a_mean_loss_cannot_be_joined() -> None:
    parallel = placed(model(), {"pp": 2}, microbatches=2)
    with pytest.raises(dtorch.PlacementError, match="2 micro-batches"):
        parallel(IDS, labels=IDS)


SCHEDULES = [
    (GPipe, 2, 1), (GPipe, 2, 2), (OneForwardOneBackward, 2, 1), (OneForwardOneBackward, 4, 1), (Interleaved, 2, 2),
    (Interleaved, 4, 2), (Interleaved, 2, 4),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "devices", "chunks"), SCHEDULES)
def test_training_by_schedule(kind: type[Schedule], devices: int, chunks: int) -> None:
    plain = model().train()
    parallel = placed(plain, {"pp": devices}, chunks=chunks)
    losses: list[list[float]] = [[], []]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, parallel)]
    for _ in range(2):
        for part in IDS.chunk(PARTS):
            loss = plain(part, labels=part).loss / PARTS
            loss.backward()
            losses[0].append(loss.item())
        schedule = kind(devices, PARTS, chunks)
        parts = IDS.chunk(PARTS)
        got = schedule.run(lambda i, p=parts: parallel(p[i], labels=p[i], use_cache=False).loss / PARTS)
        losses[1] += [loss.item() for loss in got]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.to_torch(), theirs, rtol=1e-4, atol=1e-5)


def test_a_weight_that_the_last_stage_keeps_and_the_first_uses() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
            self.head = torch.nn.Linear(8, 8)
            self.layers[3].weight = self.head.weight
            self.entry = torch.nn.Linear(8, 8)
            self.entry.weight = self.layers[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            for layer in self.layers[1:]:
                x = layer(x).tanh()
            return self.head(self.entry(x))

    torch.manual_seed(0)
    plain = Net()
    parallel = placed(plain, {"pp": 2})
    x = torch.randn(4, 8)
    want, got = plain(x), parallel(x)
    torch.testing.assert_close(got.to_torch(), want.detach(), rtol=1e-5, atol=1e-6)
    want.pow(2).sum().backward()
    got.pow(2).sum().backward()
    for mine, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_activations_that_are_computed_again() -> None:
    plain = model().train()
    parallel = placed(plain, {"pp": 2})
    parallel.activation_checkpointing_enable({"use_reentrant": False})
    parts = IDS.chunk(2)
    OneForwardOneBackward(2, 2).run(lambda i: parallel(parts[i], labels=parts[i], use_cache=False).loss)
    for part in parts:
        plain(part, labels=part).loss.backward()
    for mine, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_orders_are_the_textbooks() -> None:
    one = OneForwardOneBackward(4, 8)
    assert " ".join(map(str, one.actions(3))) == " ".join(f"F3.{i} B3.{i}" for i in range(8))
    assert [str(a) for a in one.actions(0)][:6] == ["F0.0", "F0.1", "F0.2", "F0.3", "B0.0", "F0.4"]
    # Bubbles of p devices, m micro-batches and v chunks: (p - 1) / (m v + p - 1).
    for schedule in (GPipe(4, 8), one):
        assert schedule.bubble() == pytest.approx(3 / 11)
    assert Interleaved(4, 8, 2).bubble() == pytest.approx(3 / 19)
    for schedule in (GPipe(3, 5), OneForwardOneBackward(3, 2), Interleaved(2, 6, 3)):
        done = [a for _, a in schedule.rounds()]
        assert len(done) == len(set(done)) == 2 * schedule.stages * schedule.micro_batches

    def most_under_way(schedule: Schedule) -> int:
        counts, most = 0, 0
        for action in schedule.actions(0):
            counts += -1 if action.backward else 1
            most = max(most, counts)
        return most

    assert most_under_way(one) == 4
    assert most_under_way(GPipe(4, 8)) == 8


def test_refusals() -> None:
    with pytest.raises(dtorch.PlacementError, match="multiple"):
        Interleaved(2, 3)
    with pytest.raises(dtorch.PlacementError, match="one stage a device"):
        OneForwardOneBackward(2, 4, 2)
    parallel = placed(model(), {"pp": 2})
    with pytest.raises(dtorch.PlacementError, match="3 stages"):
        GPipe(3, 2).run(lambda i: parallel(IDS[:2], labels=IDS[:2], use_cache=False).loss)
    with pytest.raises(ValueError, match="no such loss"):
        GPipe(2, 2).run(_failing)
    with pytest.raises(dtorch.PlacementError, match="microbatches=0"):
        placed(model(), {"pp": 2}, microbatches=0)


def _failing(index: int) -> torch.Tensor:
    raise ValueError("no such loss")
