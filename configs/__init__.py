"""Presets by model and by machine; `LoaderConfig.from_preset` finds them by name, as data of `dali_pipes.configs`."""
