"""The parts that rollcall ships by name, from catalog.yaml, which explains itself. No torch."""

from rollcall.config import yaml_values

TABLES: dict[str, dict[str, str]] = yaml_values.table(__file__, "catalog.yaml")
DATA_SETS, MODELS, OPTIMIZERS = TABLES["DATA_SETS"], TABLES["MODELS"], TABLES["OPTIMIZERS"]
SCHEDULES, LOSSES, LOGGERS = TABLES["SCHEDULES"], TABLES["LOSSES"], TABLES["LOGGERS"]
