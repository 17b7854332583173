"""The same, with torch loaded by the template, as dtorch's own executor has it."""

import os

import torch
from worker_side import Scripted


class WithTorch(Scripted):
    def pool(self):
        torch.ones(300, 300) @ torch.ones(300, 300)
        self.reply([f"{torch.get_num_threads()} {os.environ['OMP_WAIT_POLICY']}".encode()])
