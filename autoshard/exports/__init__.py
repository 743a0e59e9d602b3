"""Plans as configurations of other engines (:func:`export`), and back."""

from autoshard.exports.configurations import Configuration, read_configuration
from autoshard.exports.targets import KINDS, Exported, export

__all__ = ["KINDS", "Configuration", "Exported", "export", "read_configuration"]
