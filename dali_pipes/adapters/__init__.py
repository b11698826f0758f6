"""For trainers and libraries that are not a plain PyTorch loop."""
