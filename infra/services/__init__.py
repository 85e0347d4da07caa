"""PostgreSQL, Prefect, MLflow and a worker on one machine, without containers, under a supervisor."""
