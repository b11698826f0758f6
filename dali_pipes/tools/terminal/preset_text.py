"""The list of presets that `config` shows."""

from collections.abc import Mapping

from rich.text import Text

from dali_pipes.tools.terminal.console import output


def show_presets(presets: Mapping[str, str]) -> None:
    """One line per preset, and how to use them."""
    console = output()
    width = max(map(len, presets))
    for name, about in presets.items():
        console.print(Text(f"{name:<{width}}  {about}"), soft_wrap=True)
    console.print("\nCombine a model with a machine: dali-pipes config gpt2_124m h100", soft_wrap=True)
