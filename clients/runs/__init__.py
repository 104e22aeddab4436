"""The run directory.

A job's program shares it with the server or command that started the program.
"""
