"""Adapters for trainers and libraries other than a plain PyTorch loop."""
