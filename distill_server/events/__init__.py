"""The events of jobs in the database, besides what `distill_server.jobs.store` does."""
