"""Jobs in the database: states, submission, verdicts and checks."""
