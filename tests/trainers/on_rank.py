"""What each process of a launched group does: recipes from the README, unbroken, and stopped and started again.

    torchrun ... on_rank.py FOLDER CORPUS HEADING...

Writes FOLDER/rank_R.json: by heading, the batches of either run and whether they end with the same weights.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

import torch
from recipes import Run, recipe, weights

STOP_AT = 7
LIMIT_S = 150


def main(folder: Path, corpus: str, headings: list[str]) -> None:
    report = {}
    for heading in headings:
        source = recipe(heading).replace("lightning.Trainer(", 'lightning.Trainer(devices=2, strategy="ddp", ')
        place = folder / heading.replace(" ", "_")
        unbroken, broken = Run(place / "unbroken", corpus), Run(place / "broken", corpus)
        expected = weights(unbroken.start(source))
        broken.start(source, STOP_AT)
        found = weights(broken.start(source))
        report[heading] = {
            "unbroken": unbroken.batches,
            "broken": broken.batches,
            "kept": broken.kept,
            "same weights": all(map(torch.equal, expected, found)),
        }
    (folder / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
