"""The client: distributed tensors without data, and the session that forwards what happens to them."""
