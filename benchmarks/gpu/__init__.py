"""The parts of `gpu_check.py`: one module a part, the seam to the device, and the processes that parts run in."""
