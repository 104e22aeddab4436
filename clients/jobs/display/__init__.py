"""The displays of jobs: text, HTML for a notebook, tables, and a live view."""
