"""The run directory, shared by a job's program and the server or CLI that started the program."""
