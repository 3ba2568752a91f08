"""The configuration of a run: recipes, `key=value` words and the checked result. No torch."""

from rollcall.config.keys import describe, json_schema
from rollcall.config.read import origins, parse, recipes
from rollcall.config.schema import Config, ConfigError

__all__ = ["Config", "ConfigError", "describe", "json_schema", "origins", "parse", "recipes"]
