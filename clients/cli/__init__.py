"""The `distill` command. Modules import slow packages inside functions, so that --help is fast."""
