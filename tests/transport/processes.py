"""What the system knows of processes."""

import time
from pathlib import Path


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def parent_of(pid):
    return int(_stat(pid)[1])


def is_alive(pid):
    """Whether there is such a process, and it is not merely waiting to be collected."""
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def tagged(tag):
    """Pids of the living processes whose environment has the tag."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if tag.encode() in (entry / "environ").read_bytes() and is_alive(entry.name):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _stat(pid):
    """State, parent and so on: the fields after the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
