"""Executors for the workers of these tests: the first payload frame names a method, the others are its arguments."""

import ctypes
import os
import signal
import threading
import time


class Scripted:
    """Does what it is told, and keeps the number of each batch that has a ``note``."""

    def __init__(self, devices, send, peers_dir, index, physical):
        self.devices, self.reply, self.peers_dir, self.index, self.physical = devices, send, peers_dir, index, physical
        self.notes = []

    def run(self, frames):
        getattr(self, bytes(frames[0]).decode())(*frames[1:])

    def echo(self, *frames):
        self.reply(list(frames))

    def note(self, text):
        self.notes.append(bytes(text))

    def recall(self):
        self.reply(self.notes or [b""])

    def who(self):
        text = f"{self.index} {self.devices} {self.physical} {os.path.isdir(self.peers_dir)}"
        self.reply([text.encode()])

    def environment(self, name):
        self.reply([os.environ.get(bytes(name).decode(), "").encode()])

    def nothing(self):
        pass

    def fail(self):
        raise KeyError("no such tensor")

    def leave(self):
        os._exit(3)

    def halt(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def sleep(self, seconds):
        time.sleep(float(bytes(seconds)))

    def be_deaf(self):
        """Busy in native code, holding the interpreter lock."""
        ctypes.PyDLL(None).sleep(60)

    def last_words(self):
        self.reply([b"farewell"])
        os.kill(os.getpid(), signal.SIGKILL)

    def threads(self):
        self.reply([str(threading.active_count()).encode()])

    def cleanup(self, path):
        """Wait to be ended, and write down that it was."""
        try:
            self.reply([b"waiting"])
            time.sleep(60)
        finally:
            with open(bytes(path), "w") as f:
                f.write("left")


class Unmakeable:
    def __init__(self, devices, send, peers_dir, index, physical):
        raise OSError("the device is on fire")
