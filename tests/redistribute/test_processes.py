"""Redistributions between real worker processes: values, bits, and what happens when a worker goes away."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEER = Path(__file__).with_name("peer.py")


@contextmanager
def peer(jobs: str, index: int, workers: int, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A worker process, ended at the latest when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore:ComplexHalf", str(PEER), jobs, str(index), str(workers), str(directory)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    """The next line it prints; "" when it has ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.timeout(90)
def test_two_workers_get_what_one_worker_gets(tmp_path: Path) -> None:
    with peer("cases,native", 0, 2, tmp_path) as a, peer("cases,native", 1, 2, tmp_path) as b:
        assert [p.communicate()[0] for p in (a, b)] == ["done True\ndone True\n"] * 2
        assert (a.returncode, b.returncode) == (0, 0)


@pytest.mark.timeout(90)
def test_three_workers_get_what_one_worker_gets(tmp_path: Path) -> None:
    jobs = "cases,native,bits"
    with peer(jobs, 0, 3, tmp_path) as a, peer(jobs, 1, 3, tmp_path) as b, peer(jobs, 2, 3, tmp_path) as c:
        assert [p.communicate()[0] for p in (a, b, c)] == ["done True\n" * 3] * 3


@pytest.mark.timeout(60)
def test_a_killed_worker_is_noticed_at_once_and_can_be_replaced(tmp_path: Path) -> None:
    with peer("lonely", 0, 2, tmp_path) as a, peer("lonely", 1, 2, tmp_path) as b:
        assert (line(a), line(b)) == ("ready", "ready")
        time.sleep(0.2)  # until worker 0 waits inside of the next reduction
        killed = time.monotonic()
        b.kill()
        noticed, message = line(a).split(" ", 1)
        assert float(noticed) - killed < 10.0
        assert re.fullmatch(
            r"all_reduce along mesh axis 0 between workers 0, 1 failed on worker 0: .*\. A worker of this group has "
            r"ended, or did not reach this operation within 30 s\.",
            message,
        )
        assert "their process group failed earlier and waits to be formed anew" in line(a)
        with peer("replacement", 1, 2, tmp_path) as c:
            assert a.stdin is not None
            a.stdin.write("go on\n")
            a.stdin.flush()
            assert (line(a), line(c)) == ("done True", "done True")


@pytest.mark.timeout(60)
def test_a_stopped_worker_is_noticed_after_the_timeout(tmp_path: Path) -> None:
    with peer("impatient", 0, 2, tmp_path) as a, peer("impatient", 1, 2, tmp_path) as b:
        assert (line(a), line(b)) == ("ready", "ready")
        start = time.monotonic()
        b.send_signal(signal.SIGSTOP)
        noticed, message = line(a).split(" ", 1)
        assert 0.5 < float(noticed) - start < 20.0
        assert "did not reach this operation within 1 s" in message


@pytest.mark.timeout(60)
def test_a_worker_that_never_comes_is_noticed_after_the_timeout(tmp_path: Path) -> None:
    with peer("absent", 0, 2, tmp_path) as a:
        assert re.match(
            r"all_reduce along mesh axis 0 between workers 0, 1 failed on worker 0: .* within 0\.5 s\.", line(a)
        )
