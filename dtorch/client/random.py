"""Random generators. Their state lives on the workers; the client knows who has the newest.

Every worker of a mesh advances its copy by the whole global draw, so a state is the same wherever it is fresh. When
the next draw happens on devices that missed one, the state is moved there as an ordinary small tensor.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from dtorch.client.session import Session
from dtorch.client.wrap import Pending, emit_move, put, to_host, wrap
from dtorch.core.errors import SessionClosedError
from dtorch.core.placements import REPLICATE
from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.protocol import commands as C

_numbers = itertools.count(1)
_STATE_BYTES = {"cpu": 5056, "cuda": 16}
TorchGenerator = torch.Generator


def _nobody() -> None:
    return None


class Stream:
    """The client's view of one generator in one session.

    Attributes:
        number: its number on the wire.
        seed: seed not yet sent, or ``None``.
        home: mesh of the last draw; ``None`` after seeding, when every worker has the state.
        owner: session of the last draw.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.seed: int | None = seed
        self.home: MeshLayout | None = None
        self.owner: Callable[[], Session | None] = _nobody
        self.pending_state: torch.Tensor | None = None
        self.initial_seed = seed

    def __del__(self) -> None:
        session = self.owner()
        if session is not None and self.number:
            session.buf.extend((C.SEED, self.number, None))  # workers forget it

    def reseed(self, seed: int) -> None:
        """Start again from a seed at the next draw."""
        self.seed, self.initial_seed, self.home, self.pending_state = seed, seed, None, None


class Streams:
    """The streams of a session: number 0 is the default generator."""

    def __init__(self) -> None:
        self.default = Stream(0, torch.initial_seed())
        self.others: dict[int, Stream] = {}


_streams: weakref.WeakKeyDictionary[Session, Streams] = weakref.WeakKeyDictionary()


def streams(session: Session) -> Streams:
    """The session's streams."""
    found = _streams.get(session)
    if found is None:
        found = _streams[session] = Streams()
    return found


class _AnyGenerator(type(TorchGenerator)):  # type: ignore[misc]
    """Every generator of torch is an instance, as of ``torch.Generator``, whose place the class takes."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, TorchGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, TorchGenerator)


class Generator(TorchGenerator, metaclass=_AnyGenerator):
    """``torch.Generator`` that also accepts ``device="dtorch"``; installed in its place.

    On other devices the plain class is returned. The object that reaches an operator is another Python object for the
    same C++ generator, so generators are found again by that identity.
    """

    def __new__(cls, device: Any = "cpu") -> Any:
        where = torch.device(device)
        if where.type != "dtorch":
            return TorchGenerator(device)
        made: Any = TorchGenerator.__new__(cls, "cpu")  # type: ignore[call-arg]
        made._where = torch.device("dtorch", where.index or 0)
        made._stream = Stream(next(_numbers), torch.default_generator.initial_seed())
        _ours[made._cdata] = made
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The dtorch device it was made for."""
        return self._where  # type: ignore[no-any-return, attr-defined]

    def manual_seed(self, seed: int) -> Generator:
        """Start the sequence again from ``seed``."""
        self._stream.reseed(int(seed))  # type: ignore[attr-defined]
        return self

    def seed(self) -> int:
        """Seed from the system's randomness; returns the seed."""
        value = int(torch.empty((), dtype=torch.int64).random_().item())
        self.manual_seed(value)
        return value

    def initial_seed(self) -> int:
        """The last seed."""
        return self._stream.initial_seed  # type: ignore[no-any-return, attr-defined]

    def get_state(self) -> torch.Tensor:
        """The state as a CPU uint8 tensor; waits for the workers."""
        return get_state(self._stream)  # type: ignore[attr-defined]

    def set_state(self, state: torch.Tensor) -> Generator:
        """Continue from a state of ``get_state``."""
        set_state(self._stream, state)  # type: ignore[attr-defined]
        return self


_ours: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()


def is_ours(generator: Any) -> bool:
    """Whether a generator belongs to a dtorch device."""
    return generator._cdata in _ours


def generator_number(session: Session, generator: Any, mesh: MeshLayout) -> int:
    """Number of the generator for a draw on ``mesh``, with its state brought there first."""
    stream = _ours[generator._cdata]._stream if generator is not None else streams(session).default  # type: ignore[attr-defined]
    bring(session, stream, mesh)
    return stream.number


def bring(session: Session, stream: Stream, mesh: MeshLayout) -> None:
    """Bring a stream's state to the workers of a mesh, where the next draw happens."""
    if stream.home is not None and stream.owner() is not session:
        set_state(stream, get_state(stream))
    stream.owner = weakref.ref(session)
    if stream.pending_state is not None:
        state, stream.pending_state = stream.pending_state, None
        t = put(session, state, mesh)
        session.buf.extend((C.RESTORE, stream.number, t._h.id))
    elif stream.seed is not None:
        session.buf.extend((C.SEED, stream.number, stream.seed))
        stream.seed = None
    elif stream.home is not None and stream.home is not mesh:
        missed = session.workers_of(mesh) - session.workers_of(stream.home)
        if missed:
            _carry(session, stream, mesh)
    stream.home = mesh


def every_stream(session: Session) -> list[Stream]:
    """The session's default stream, and those of all generators that the program holds."""
    return [streams(session).default, *(g._stream for g in list(_ours.values()))]  # type: ignore[attr-defined]


def settle(session: Session, stream: Stream) -> None:
    """Send a seed that waits for the next draw."""
    if stream.seed is not None:
        session.buf.extend((C.SEED, stream.number, stream.seed))
        stream.owner, stream.seed, stream.home = weakref.ref(session), None, None


def _state_spec(session: Session, mesh: MeshLayout) -> TensorSpec:
    size = _STATE_BYTES.get(session.config.device_type, 16)
    return session.make_spec(mesh, (REPLICATE,) * mesh.ndim, (size,), (1,), torch.uint8)


def _carry(session: Session, stream: Stream, mesh: MeshLayout) -> None:
    assert stream.home is not None
    here, there = _state_spec(session, stream.home), _state_spec(session, mesh)
    a, b = session.ids(), session.ids()
    with session.lock:
        number = session.spec_id(here)
        session.buf.extend((C.STATE, stream.number, a, number))
    emit_move(session, a, here, b, there)
    session.buf.extend((C.RESTORE, stream.number, b, -a, -b))


def get_state(stream: Stream) -> torch.Tensor:
    """The state of a stream as a CPU uint8 tensor; waits for the workers.

    Raises:
        SessionClosedError: it went with the session of the last draw.
    """
    state = state_tensor(stream)
    return state if type(state) is torch.Tensor else Pending(state).get()


def state_tensor(stream: Stream) -> torch.Tensor:
    """The state of a stream as a uint8 tensor, distributed when only workers know it; does not wait.

    Raises:
        SessionClosedError: it went with the session of the last draw.
    """
    if stream.pending_state is not None:
        return stream.pending_state.clone()
    if stream.seed is not None or stream.home is None:
        g = TorchGenerator()
        g.manual_seed(stream.initial_seed if stream.seed is None else stream.seed)
        return g.get_state()
    session = stream.owner()
    if session is None or session.closed is not None:
        raise SessionClosedError("The generator's state went with the session that drew from it last; seed it again.")
    spec = _state_spec(session, stream.home)
    new = session.ids()
    with session.lock:
        number = session.spec_id(spec)
        session.buf.extend((C.STATE, stream.number, new, number))
    return wrap(session, new, spec)  # type: ignore[no-any-return]


def set_state(stream: Stream, state: torch.Tensor) -> None:
    """Continue from this state at the next draw.

    Raises:
        RuntimeError: it is no state of a generator.
    """
    if state.numel() != _STATE_BYTES["cuda"]:
        TorchGenerator().set_state(state.detach().cpu())  # says what is wrong
    stream.pending_state = state.detach().cpu().clone()
    stream.seed = None
    stream.home = None


def draw_on_host(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], generator: Any) -> Any:
    """A CPU generator with distributed tensors: the draw happens here, as on plain torch, and its result moves."""
    first: list[Any] = []

    def convert(value: Any) -> Any:
        if type(value) is cls:
            first.append(value)
            return to_host(value)
        return value

    host_args = [convert(a) for a in args]
    host_kwargs = {k: convert(v) if not isinstance(v, torch.device) else "cpu" for k, v in kwargs.items()}
    result = func(*host_args, **host_kwargs)
    session, spec = first[0]._h.session, first[0]._h.spec
    if any(result is a for a in host_args):
        first[0].copy_(result)
        return first[0]
    return put(session, result, spec.mesh)
