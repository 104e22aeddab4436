"""The `distill` command. Modules here import slow packages inside functions: --help stays fast."""
