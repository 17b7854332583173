"""The worker: holds the local tensors of its devices and runs the command stream on them."""
