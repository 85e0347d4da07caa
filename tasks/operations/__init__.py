"""Years of operation: retention, backup, audit, models that descend from a row."""
