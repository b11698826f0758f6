"""Bar charts of one size: rate and CPU time, medians with the lowest and highest round. Needs matplotlib."""

import math
from pathlib import Path
from typing import Any

_COLOURS = {"ours": "#76b900", "yardstick": "#5b7fa6", "loop": "#c9b37e", "loader": "#9aa5b1"}
_LINEAR_UP_TO = 20  # times the shortest bar; beyond it the short ones could not be told apart


def save_chart(run: dict[str, Any], path: Path) -> None:
    """Write a PNG, or nothing where nothing was measured. Raises ImportError where matplotlib is missing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot
    from matplotlib.patches import Patch

    measured = {name: result for name, result in run["alternatives"].items() if result.get("median")}
    if not measured:
        return
    names = sorted(measured, key=lambda name: measured[name]["median"]["tokens_per_s"])
    figure, panels = pyplot.subplots(1, 2, figsize=(13, 1.2 + 0.36 * len(names)), sharey=True, layout="constrained")
    for panel, key, factor, title in (
        (panels[0], "tokens_per_s", 1e-6, "million tokens per second"),
        (panels[1], "cpu_s_per_mtok", 1e3, "CPU ms per million tokens, all processes"),
    ):
        low, middle, high = (
            [measured[name][part][key] * factor for name in names] for part in ("low", "median", "high")
        )
        spread = [
            [value - least for value, least in zip(middle, low, strict=True)],
            [most - value for value, most in zip(middle, high, strict=True)],
        ]
        colours = [_COLOURS[measured[name]["kind"]] for name in names]
        panel.barh(names, middle, xerr=spread, color=colours, ecolor="#444444", capsize=2)
        for place, (value, most) in enumerate(zip(middle, high, strict=True)):
            panel.text(most, place, f"  {value:.3g}", va="center", fontsize=8)
        logarithmic = min(middle) > 0 and max(middle) > _LINEAR_UP_TO * min(middle)
        if logarithmic:
            panel.set_xscale("log")
            panel.set_xlim(left=10 ** math.floor(math.log10(min(middle)) - 0.1), right=3 * max(high))
        else:
            panel.set_xlim(left=0, right=1.15 * max(high))
        panel.set_title(title + (" (log scale)" if logarithmic else ""), fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    present = {measured[name]["kind"] for name in names}
    swatches = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items() if kind in present]
    figure.legend(handles=swatches, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(f"batch_size {run['batch_size']}, seq_len {run['seq_len']}, warm page cache")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
