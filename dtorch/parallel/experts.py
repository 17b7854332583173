"""Expert parallelism: each device along ``ep`` computes the experts it holds, with the model's own code.

transformers' expert modules take tokens, the numbers of the experts that each token goes to, and their weights; a number
of ``num_experts`` or more stands for an expert elsewhere. That is all that is needed: around the module, tokens go where
their experts are, numbers become those of the experts there, and what comes out goes home. No token is dropped.

Tokens that every device along ``ep`` has are sent nowhere: each device computes its experts' terms, and one reduction
adds them. Tokens cut along ``ep`` go by all-to-all, to each device once however many of its experts want them, and come
back the same way. How many go is read once a call, so that the buffers are no larger than they must be.

Shapes: T tokens of a device, K experts of a token, E experts of a device, N devices along ``ep``, C places in a buffer for
one device, H features.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dtorch.client.each import even, exchange, from_each, refuse_reads, to_each
from dtorch.client.factories import make
from dtorch.client.tensor import DTensor
from dtorch.core.errors import PlacementError
from dtorch.core.mesh import DeviceMesh
from dtorch.core.placements import REPLICATE, Partial, Placement, Shard

# A buffer has one of about so many sizes: each needs plans of its own.
_SIZES = 16


def find_experts(module: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold several experts and compute a subset of them when told to, by name."""
    return {
        name: part
        for name, part in module.named_modules()
        if hasattr(part, "_is_expert_parallel") and isinstance(getattr(part, "num_experts", None), int)
    }


def check_experts(module: nn.Module, devices: int) -> tuple[str, ...]:
    """What a user should know of experts that do not divide by the devices along ``ep``.

    Raises:
        PlacementError: a module has fewer experts than there are devices.
    """
    counts = {name: int(part.num_experts) for name, part in find_experts(module).items()}  # type: ignore[arg-type]
    for name, count in counts.items():
        if count < devices:
            raise PlacementError(f"{name} has {count} experts, which cannot be spread over {devices} devices along ep.")
    uneven = [name for name, count in counts.items() if count % devices]
    if not uneven:
        return ()
    first = f"{uneven[0]}: {counts[uneven[0]]} experts"
    return (f"{first} do not divide by ep={devices}: every device gathers them all in each call.",)


def on_own_experts(part: nn.Module, ep: Sequence[int]) -> None:
    """Let every call of an expert module compute each device's own experts, and send tokens to and fro.

    Calls whose tokens or experts cannot be cut evenly run as they would without: parameters are gathered.

    Args:
        part: one of ``find_experts``, placed.
        ep: mesh axes that cut its experts; with none of them, devices that have tokens of their own sort just these.
    """
    names = list(inspect.signature(part.forward).parameters)
    under_way: list[_Call] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = [{**dict(zip(names, args, strict=False)), **kwargs}.get(name) for name in names[:3]]
        experts = _experts_of(part, ep)
        implementation = getattr(getattr(part, "config", None), "_experts_implementation", None)
        if experts is None or implementation in (None, "eager") or len(args) + len(kwargs) != 3:
            return None
        if not all(isinstance(t, DTensor) and t.dim() == 2 for t in inputs):
            return None
        call = _Call(part, ep, inputs, experts)
        if not call.each:
            return None
        under_way.append(call)
        return call.begin(), {}

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if not under_way:
            return None
        call = under_way.pop()
        call.restore()
        return None if output is None else call.finish(output)

    part.register_forward_pre_hook(before, with_kwargs=True)
    part.register_forward_hook(after, always_call=True)


Held = list[tuple[nn.Module, str, DTensor]]


def _experts_of(part: nn.Module, ep: Sequence[int]) -> Held | None:
    """The parameters of an expert module with their owners, unless a device does not hold whole experts of them."""
    found: Held = []
    for owner in part.modules():
        for name in owner._parameters:
            p = getattr(owner, name)
            if p is None:
                continue
            own = owner is part
            if not isinstance(p, DTensor) or not even(p._h.spec, range(p.device_mesh.ndim)):
                return None
            if any((p.placements[a] == Shard(0)) != own for a in ep):
                return None
            found.append((owner, name, p))
    return found


class _Call:
    """One call of an expert module."""

    def __init__(self, part: nn.Module, ep: Sequence[int], inputs: Sequence[Any], held: Held) -> None:
        self.part, self.ep, self.held = part, ep, held
        # Axes that cut the experts themselves (tp) need every token; along others tokens stay as they are.
        inner = {a for _, _, p in held for a, q in enumerate(p.placements) if a not in ep and isinstance(q, Shard)}
        spec = inputs[0]._h.spec
        wanted = [p if p == Shard(0) and a not in inner else REPLICATE for a, p in enumerate(spec.placements)]
        for a in ep if len(ep) > 1 else ():
            wanted[a] = REPLICATE
        if not even(spec.replace(tuple(wanted)), range(len(wanted))):
            wanted = [REPLICATE] * len(wanted)
        self.tokens, self.chosen, self.weights = (t.redistribute(placements=wanted) for t in inputs)
        self.cut = [a for a, p in enumerate(wanted) if p == Shard(0)]
        self.each = sorted({*ep, *self.cut})
        self.sends = ep[0] if len(ep) == 1 and ep[0] in self.cut else None
        self.mesh: DeviceMesh = self.tokens.device_mesh
        self.session = self.tokens._h.session
        self.total = int(part.num_experts)  # type: ignore[arg-type]
        self.devices = 1
        for a in ep:
            self.devices *= self.mesh.size(a)
        self.own = self.total // self.devices
        self._attributes = {"num_experts": self.total, "_is_expert_parallel": part._is_expert_parallel}
        self._reads = 0

    def begin(self) -> tuple[torch.Tensor, ...]:
        """Tokens, numbers and weights as the module gets them on each device."""
        tokens, chosen, weights = (to_each(t, self.each) for t in (self.tokens, self.chosen, self.weights))
        if self.sends is not None:
            tokens, chosen, weights = self._send(tokens, chosen, weights)
        self._reads = self.session.reads
        for owner, name, p in self.held:
            owner.__dict__[name] = to_each(p, self.each)
        if not self.ep:
            return tokens, chosen, weights
        self.part.__dict__.update(num_experts=self.own, _is_expert_parallel=True)
        numbers = self._arange(self.total, [Shard(0) if a in self.ep else REPLICATE for a in range(self.mesh.ndim)])
        first = to_each(numbers, self.each)[0]
        mine = (chosen >= first) & (chosen < first + self.own)
        return tokens, torch.where(mine, chosen - first, self.own), weights.masked_fill(~mine, 0.0)

    def restore(self) -> None:
        """Undo what ``begin`` did to the module."""
        self.part.__dict__.update(self._attributes)
        for owner, name, _ in self.held:
            owner.__dict__.pop(name, None)

    def finish(self, output: DTensor) -> torch.Tensor:
        """The module's result, placed as the tokens were; along ``ep`` a sum, where every device had them all."""
        refuse_reads(self.session, self._reads, f"{type(self.part).__name__}.forward")
        if self.sends is not None:
            output = self._bring_home(output)
        where: dict[int, Placement] = {a: Shard(0) if a in self.cut else Partial("sum") for a in self.each}
        return from_each(output, where)

    def _send(self, tokens: DTensor, chosen: DTensor, weights: DTensor) -> tuple[Any, Any, Any]:
        """(T, H), (T, K), (T, K) -> what came for this device: (N * C, H), (N * C, K), (N * C, K)."""
        t, n = tokens.shape[0], self.devices
        device = torch.div(chosen, self.own, rounding_mode="floor")
        goes = (device.unsqueeze(-1) == self._arange(n)).any(1)  # (T, N)
        before = goes.cumsum(0) - 1  # how many earlier tokens go to the same device
        self.capacity = c = self._capacity(goes.sum(0).max(), t)
        # Choices of one device share a place; the first of them counts when the result comes home.
        self.places = device * c + before.gather(1, device)
        same = (device.unsqueeze(2) == device.unsqueeze(1)).tril(-1)
        self.repeated = same.any(2)
        rows = self._arange(t).unsqueeze(1).expand(-1, chosen.shape[1]).reshape(-1)
        source = torch.full((n * c,), t, device=tokens.device).scatter(0, self.places.view(-1), rows)
        row = source.clamp(max=t - 1)
        sent = torch.where((source < t).unsqueeze(1), chosen[row], self.total)
        return tuple(self._exchange(x) for x in (tokens[row], sent, weights[row]))  # type: ignore[return-value]

    def _bring_home(self, output: DTensor) -> DTensor:
        """(N * C, H) -> (T, H): every token's terms from all devices, added."""
        terms = self._exchange(output)[self.places]
        return terms.masked_fill(self.repeated.unsqueeze(-1), 0.0).sum(1)  # type: ignore[return-value]

    def _exchange(self, x: Any) -> DTensor:
        n, c = self.devices, self.capacity
        assert self.sends is not None
        return exchange(x.view(n, c, *x.shape[1:]), self.sends).flatten(0, 1)  # type: ignore[return-value]

    def _capacity(self, most: Any, tokens: int) -> int:
        """Places for each device: the most that any device sends to any other, which every device must know."""
        if self.session.config.null_workers:
            # Nothing is computed, so nothing is known: as if the router chose evenly.
            share = 1 - (1 - 1 / self.devices) ** self.chosen.shape[1]
            return -(-int(tokens * share * 1000) // 1000) or 1
        step = max(tokens // _SIZES, 1)
        largest = from_each(most, dict.fromkeys(self.each, Partial("max"))).item()
        return min(-(-int(largest) // step) * step, tokens) or 1

    def _arange(self, stop: int, placements: Sequence[Placement] | None = None) -> Any:
        return make(torch.arange, (stop,), {}, self.mesh, placements, None)
