"""Moves lists of byte frames between processes; knows nothing of what they mean."""
