"""Starting scripts as users do: with torchrun, on gloo."""

import os
import subprocess
import sys
from pathlib import Path

PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def torchrun(processes: int, script: Path, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in several processes. Returns how the launcher ended."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*PATHS, environment.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(script), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
