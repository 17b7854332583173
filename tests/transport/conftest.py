"""Real sessions, and what is left of them."""

import os
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dtorch.launch.local import LaunchConfig, LocalLink
from dtorch.protocol.codec import decode, encode
from dtorch.protocol.messages import Ack, Batch, Reply, WorkerUp
from tests.transport.processes import parent_of, tagged, wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TAG_VARIABLE = "DTORCH_TRANSPORT_TEST"
LIMIT_S = 30.0


@dataclass
class Session:
    """A link with its workers up, and short names for what tests do with it."""

    link: LocalLink
    tag: str
    seq: int = -1
    up: dict = field(default_factory=dict)
    seen: list = field(default_factory=list)  # messages that came while something else was waited for

    def batch(self, *frames, targets=None):
        self.seq += 1
        self.link.send([encode(Batch(self.seq, targets)), *frames])
        return self.seq

    def next(self, timeout_s=LIMIT_S):
        frames = self.link.receive(timeout_s)
        return None if frames is None else (decode(frames[0]), [bytes(f) for f in frames[1:]])

    def until(self, kind):
        """The next message of a kind, with its payload."""
        while True:
            got = self.next()
            assert got is not None, f"no {kind.__name__} came; before: {self.seen}"
            if isinstance(got[0], kind):
                return got
            self.seen.append(got[0])

    def add(self, count=1, **env):
        for _ in range(count):
            self.link.add_worker([10 * len(self.up)], 1, env)
            message = self.until(WorkerUp)[0]
            self.up[message.index] = message.pid

    def ask(self, *frames, index=0):
        """The payload with which one worker answers."""
        seq = self.batch(*frames, targets=(index,))
        message, payload = self.until(Reply)
        assert message.index == index
        while self.until(Ack)[0].seq < seq:
            pass
        return payload

    @property
    def controller(self):
        return self.link._process.pid

    @property
    def template(self):
        return parent_of(next(iter(self.up.values())))


@pytest.fixture
def tag():
    """A mark for processes; whatever bears it at the end of the test has been forgotten."""
    value = f"{TAG_VARIABLE}={uuid.uuid4().hex}"
    yield value
    assert wait_until(lambda: not tagged(value)), f"processes left behind: {tagged(value)}"


@pytest.fixture
def open_session(tag):
    """Open sessions, and close them after the test."""
    links = []

    def open_one(executor="worker_side:Scripted", workers=0, env=(), **config):
        name, value = tag.split("=")
        settings = LaunchConfig(executor=executor, env={"PYTHONPATH": str(HERE), name: value, **dict(env)}, **config)
        links.append(LocalLink(settings))
        session = Session(links[-1], tag)
        session.add(workers)
        return session

    yield open_one
    for link in links:
        link.close()
        assert not Path(link._session_dir).exists()


@pytest.fixture
def start_program(tag, tmp_path):
    """Start a program, without a main guard, that opens a session of two workers; its stdout is line by line."""
    prelude = f"""
import os, signal, sys, time
from dtorch.launch.local import LaunchConfig, LocalLink
from dtorch.protocol.codec import decode, encode
from dtorch.protocol.messages import *
link = LocalLink(LaunchConfig(executor="worker_side:Scripted", env={{"PYTHONPATH": {str(HERE)!r}}}))
pids = []
for device in (0, 1):
    link.add_worker([device], 1, {{}})
    message = None
    while not isinstance(message, WorkerUp):
        message = decode(link.receive(30)[0])
    pids.append(message.pid)
print("UP", link._session_dir, *pids, flush=True)
"""
    started = []

    def start(text):
        path = tmp_path / "program.py"
        path.write_text(prelude + text)
        name, value = tag.split("=")
        process = subprocess.Popen(
            [sys.executable, str(path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        first = process.stdout.readline().split()
        assert first[:1] == ["UP"], process.stderr.read()
        process.session_dir = Path(first[1])
        process.workers = [int(pid) for pid in first[2:]]
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
        assert wait_until(lambda p=process: not p.session_dir.exists())
