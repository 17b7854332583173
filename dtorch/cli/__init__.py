"""The `dtorch` command. Modules here import torch and what is built on it inside commands only, so help is instant."""
