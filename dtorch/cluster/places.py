"""Which place of the pool a worker gets. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_LOOPBACK = ("127.", "localhost", "::1")


@dataclass(frozen=True, order=True)
class Place:
    """A place for workers: ``slot`` of the machine ``agent``, numbered as they joined."""

    agent: int
    slot: int


@dataclass(frozen=True)
class Machine:
    """A machine of the pool. ``address``: on which its workers listen for those of others; ``slots``: its devices."""

    host: str
    address: str
    slots: tuple[str, ...]

    def reaches(self, other: Machine) -> bool:
        """Whether workers here and there can speak with each other."""
        if self.address.startswith(_LOOPBACK) or other.address.startswith(_LOOPBACK):
            return self.host == other.host
        return True


def count(machines: Iterable[Machine], device_type: str) -> int:
    """Places for workers with devices of this type."""
    return sum(slot.startswith(f"{device_type}:") for machine in machines for slot in machine.slots)


def choose(
    machines: Mapping[int, Machine],
    device_type: str,
    used: Iterable[Place],
    own: Iterable[Place],
    last: Place | None,
    meeting: int | None,
) -> Place | str:
    """A place for one more worker of a session, or why there is none.

    The place that the worker had before, if it is there: its snapshot may be. Otherwise where the session has the
    fewest, on the machine where it has most, where others have the fewest.

    Args:
        machines: by number.
        device_type: of the session.
        used: the places of all sessions' workers.
        own: those of this session's.
        last: that of this worker before it was lost.
        meeting: the machine that all workers of the session must reach.
    """
    kinds = [
        (Place(number, slot), machine)
        for number, machine in machines.items()
        for slot, kind in enumerate(machine.slots)
        if kind.startswith(f"{device_type}:")
    ]
    if not kinds:
        return f"the pool has no device of type {device_type!r} left"
    meets = machines.get(meeting) if meeting is not None else None
    near = [place for place, machine in kinds if meets is None or machine.reaches(meets)]
    if not near:
        return (
            "the pool's other machines cannot be reached from where this session's workers meet: start `dtorch worker` "
            "with --data-address, the machine's address in a network of the pool's own"
        )
    here, all_used = Counter(own), Counter(used)
    machine_load = Counter(place.agent for place in here.elements())
    free = [place for place in near if device_type == "cpu" or not here[place]]
    if not free:
        return f"every device of type {device_type!r} of the pool hosts a worker of this session already"
    if last in free and not here[last]:
        return last
    return min(free, key=lambda p: (here[p], -machine_load[p.agent], all_used[p], p))
