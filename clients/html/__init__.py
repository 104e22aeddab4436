"""The style of HTML pages and of the output of notebooks."""
