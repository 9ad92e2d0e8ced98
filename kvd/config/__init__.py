"""Settings: what there are, where each comes from, and what may not be."""

from kvd.config.settings import SETTINGS, Config, ConfigError, as_toml, file_of, load

__all__ = ["SETTINGS", "Config", "ConfigError", "as_toml", "file_of", "load"]
