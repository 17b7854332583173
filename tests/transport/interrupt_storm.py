"""Messages to a mirror and back under an exception from a signal handler, as Ctrl-C raises it, every half millisecond.

A program of its own, because such exceptions hit whatever runs in the process.
"""

import gc
import signal
import socket
import threading
import time

from dtorch.comm.channel import Channel


class InterruptedHereError(Exception):
    pass


def mirror(channel):
    while (frames := channel.receive()) != [b"end"]:
        channel.send(frames)


def interrupt(signum, frame):
    raise InterruptedHereError


def body(number):
    return bytes([number % 256]) * (100 if number % 7 else 300_000)


class Storm:
    def __init__(self, channel):
        self.channel, self.sent, self.got, self.interrupts = channel, 0, {}, 0

    def exchange(self, end):
        while time.monotonic() < end:
            self.sent += 1
            self.channel.send([b"%d" % self.sent, body(self.sent)])
            while (frames := self.channel.receive(0)) is not None:
                self.got[int(frames[0])] = frames[1]

    def rage(self, end):
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                self.exchange(end)
            except InterruptedHereError:
                self.interrupts += 1


def main():
    gc.disable()
    left, right = (Channel(s) for s in socket.socketpair())
    peer = threading.Thread(target=mirror, args=(right,))
    peer.start()
    storm = Storm(left)
    signal.signal(signal.SIGALRM, interrupt)
    storm.rage(time.monotonic() + 1.5)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    left.send([b"0", b""])
    while (frames := left.receive(10))[0] != b"0":
        storm.got[int(frames[0])] = frames[1]
    left.send([b"end"])
    peer.join()
    numbers = list(storm.got)
    assert numbers == sorted(numbers)
    assert all(storm.got[number] == body(number) for number in numbers)
    assert storm.interrupts > 100, storm.interrupts
    # One that hits between two calls, in this program, takes a message with it.
    assert len(numbers) >= storm.sent - storm.interrupts, (len(numbers), storm.sent, storm.interrupts)


main()
