"""The configuration of a loader: settings from keywords, files and presets, checked and frozen."""

from dali_pipes.config.loader_config import DOCUMENT_ORDER_FIELDS, ORDER_FIELDS, LoaderConfig, Paths
from dali_pipes.config.outputs import OUTPUT_NAMES

__all__ = ["DOCUMENT_ORDER_FIELDS", "ORDER_FIELDS", "OUTPUT_NAMES", "LoaderConfig", "Paths"]
