"""Whatever ends, and however, everything below it ends too, and the client learns of it."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dtorch.core.errors import CommError, SessionClosedError
from dtorch.launch.local import LaunchConfig, LocalLink
from dtorch.protocol.codec import encode
from dtorch.protocol.messages import Ack, Ping, Pong, Reply, WorkerLost
from tests.transport.processes import is_alive, parent_of, tagged, wait_until

IDLE = "while True: link.receive(None)\n"


def gone(tag, seconds=10.0):
    return wait_until(lambda: not tagged(tag), seconds)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


# The client ends


@pytest.mark.parametrize("stopped", [False, True], ids=["", "with a stopped worker"])
def test_client_killed(start_program, tag, stopped):
    program = start_program(IDLE)
    assert len(tagged(tag)) == 5  # client, controller, template, two workers
    if stopped:
        os.kill(program.workers[0], signal.SIGSTOP)
    kill(program.pid)
    program.wait()
    assert gone(tag, 3)
    assert wait_until(lambda: not program.session_dir.exists(), 1)


def test_client_and_template_killed_while_a_worker_is_deaf(start_program, tag):
    program = start_program(
        "link.send([encode(Batch(0, None)), b'be_deaf'])\ntime.sleep(0.2)\nprint('BUSY', flush=True)\n" + IDLE
    )
    program.stdout.readline()
    kill(parent_of(program.workers[0]))
    kill(program.pid)
    program.wait()
    assert gone(tag, 3)


@pytest.mark.parametrize("whole_group", [True, False], ids=["group", "client"])
def test_interrupt(start_program, tag, whole_group):
    program = start_program(IDLE)
    (os.killpg if whole_group else os.kill)(program.pid, signal.SIGINT)
    _, err = program.communicate(timeout=10)
    assert program.returncode not in (0, -signal.SIGKILL)
    assert err.count("Traceback (most recent call last)") == 1
    assert "KeyboardInterrupt" in err
    assert gone(tag, 3)


def test_a_session_survives_an_interrupt(start_program):
    program = start_program("""
link.send([encode(Batch(0, None)), b"sleep", b"0.3"])
try:
    print("WAITING", flush=True)
    while True:
        link.receive(None)
except KeyboardInterrupt:
    link.send([encode(Ping(5))])
    while decode(link.receive(5)[0]) != Pong(5):
        pass
    print("ALIVE", flush=True)
""")
    assert program.stdout.readline() == "WAITING\n"
    os.killpg(program.pid, signal.SIGINT)
    out, err = program.communicate(timeout=10)
    assert (out, err, program.returncode) == ("ALIVE\n", "", 0)


@pytest.mark.parametrize(
    ("text", "code"),
    [("", 0), ("raise ValueError(1)", 1), ("sys.exit(5)", 5), ("os._exit(6)", 6), ("link.close()", 0), ("del link", 0)],
)
def test_every_way_to_end_a_program(start_program, tag, text, code):
    program = start_program(text)
    assert program.wait(10) == code
    assert gone(tag, 3)
    assert wait_until(lambda: not program.session_dir.exists(), 1)


def test_a_program_that_becomes_another(start_program, tag):
    program = start_program("os.environ.clear()\nos.execv('/bin/sleep', ['sleep', '20'])")
    assert gone(tag, 5)
    assert program.poll() is None


# The processes below end


def test_controller_killed(open_session, tag):
    session = open_session(workers=2)
    timer = threading.Timer(0.2, kill, [session.controller])
    timer.start()
    with pytest.raises(
        CommError, match=rf"the controller process \(pid {session.controller}\) ended with signal SIGKILL; "
    ):
        session.link.receive(None)
    for use in (lambda: session.link.send([b"x"]), lambda: session.link.receive(0), lambda: session.link.receive(None)):
        with pytest.raises(CommError, match="ended with signal SIGKILL"):
            use()
    assert gone(tag, 3)


def test_sending_to_a_killed_controller(open_session, tag):
    session = open_session(workers=1)
    kill(session.controller)
    assert gone(tag, 3)
    with pytest.raises(CommError, match="ended with signal SIGKILL"):
        session.link.send([bytes(10_000_000)])


def test_template_killed(open_session):
    session = open_session(workers=2)
    template, pids = session.template, dict(session.up)
    kill(template)
    for index in range(2):
        lost, _ = session.until(WorkerLost)
        assert (lost.index, lost.pid) == (index, pids[index])
        assert f"the template process (pid {template}) ended with signal SIGKILL" in lost.reason
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids.values()), 3)
    session.add()  # by another template
    assert session.ask(b"echo", b"again", index=2) == [b"again"]


def test_worker_killed(open_session):
    session = open_session(workers=2)
    session.batch(b"sleep", b"0.2")
    last = session.batch(b"nothing")
    kill(session.up[0])
    lost, _ = session.until(WorkerLost)
    assert lost == WorkerLost(0, session.up[0], (0,), "signal SIGKILL")
    while session.until(Ack)[0].seq < last:
        pass
    assert session.ask(b"echo", b"fine", index=1) == [b"fine"]


# Closing


def test_close_ends_everything_before_it_returns(open_session, tag):
    session = open_session(workers=2)
    started = time.monotonic()
    session.link.close()
    assert time.monotonic() - started < 5
    assert not tagged(tag)


def test_close_at_once(open_session, tag):
    session = open_session("worker_side_torch:WithTorch")
    session.link.add_worker([0], 1, {})
    session.link.close()
    assert not tagged(tag)


@pytest.mark.parametrize("state", [b"halt", b"be_deaf"])
def test_close_with_a_worker_that_does_not_listen(open_session, tag, state):
    session = open_session(workers=2)
    session.batch(state, targets=(0,))
    time.sleep(0.1)
    started = time.monotonic()
    session.link.close()
    assert time.monotonic() - started < 6
    assert not tagged(tag)


def test_close_lets_a_worker_leave_what_it_is_in(open_session, tmp_path):
    session = open_session(workers=1)
    session.batch(b"cleanup", bytes(tmp_path / "trace"))
    session.until(Reply)
    session.link.close()
    assert (tmp_path / "trace").read_text() == "left"


@pytest.mark.parametrize("victim", ["controller", "template"])
def test_close_when_a_process_is_stopped(open_session, tag, victim):
    session = open_session(workers=2)
    os.kill(getattr(session, victim), signal.SIGSTOP)
    started = time.monotonic()
    session.link.close(timeout_s=1.5)
    assert time.monotonic() - started < 6
    assert not tagged(tag)


def test_close_after_the_controller_was_killed(open_session, tag):
    session = open_session(workers=2)
    kill(session.controller)
    session.link.close()
    assert not tagged(tag)


def test_sessions_come_and_go_without_a_trace(open_session):
    def state():
        return sorted(os.listdir("/proc/self/fd")), threading.active_count()

    open_session(workers=1).link.close()
    before = state()
    for _ in range(20):
        open_session(workers=1).link.close()
    assert state() == before


def test_what_cannot_be_started(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(CommError, match="cannot be started"):
        LocalLink(LaunchConfig())
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not list(tmp_path.iterdir())


# Forks of the client


def in_a_fork(check):
    """Run ``check`` and the exit functions in a fork of this process; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = check()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_cannot_use_the_session_and_its_end_harms_nobody(open_session):
    session = open_session(workers=1)

    def check():
        for use in (lambda: session.link.send([b"x"]), lambda: session.link.receive(None)):
            try:
                use()
            except SessionClosedError as error:
                if f"fork of process {os.getppid()}" not in str(error):
                    return 1
            else:
                return 2
        session.link.close()
        return 0

    assert in_a_fork(check) == 0
    session.link.send([encode(Ping(1))])
    assert session.until(Pong)[0].token == 1


def test_a_fork_can_open_a_session_of_its_own(open_session, tag):
    session = open_session(workers=1)

    def check():
        own = open_session(workers=1)
        answer = own.ask(b"echo", b"mine")
        own.link.close()
        return 0 if answer == [b"mine"] else 1

    assert in_a_fork(check) == 0
    assert session.ask(b"echo", b"ours") == [b"ours"]


def test_what_the_client_starts_does_not_keep_the_session_alive(start_program, tag):
    program = start_program(
        """
import subprocess
child = subprocess.Popen(["sleep", "30"], env={}, close_fds=False)
other = os.fork()
if other == 0:
    os.execve("/bin/sleep", ["sleep", "30"], {})
fork = os.fork()
if fork == 0:
    time.sleep(30)
print(fork, other, child.pid, flush=True)
"""
        + IDLE
    )
    children = [int(pid) for pid in program.stdout.readline().split()]
    kill(program.pid)
    program.wait()
    assert wait_until(lambda: tagged(tag) == children[:1], 3)
    for pid in children:
        kill(pid)


# Nothing can be reached from outside


def test_nothing_listens_and_the_directory_is_private(open_session, tag):
    session = open_session(workers=1)
    assert os.stat(session.link._session_dir).st_mode & 0o777 == 0o700
    listening = set()
    for name in ("tcp", "tcp6", "unix"):
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = row.split()
            if name == "unix" and int(fields[3], 16) & 0x10000:  # accepts connections
                listening.add(f"socket:[{fields[6]}]")
            elif name != "unix" and fields[3] == "0A":
                listening.add(f"socket:[{fields[9]}]")
    for pid in tagged(tag):
        assert not listening & {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}


def test_processes_hold_no_descriptors_of_others(open_session):
    session = open_session(workers=3)
    counts = [len(os.listdir(f"/proc/{pid}/fd")) for pid in session.up.values()]
    assert counts == [counts[0]] * 3


def test_the_controller_is_light(open_session):
    status = Path(f"/proc/{open_session(workers=1).controller}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) < 60_000  # KiB
