"""Years of operation: retention, dumps, audit, models that descend from a row."""
