"""The program of `distill eval`: samples many answers per prompt and scores them with a reward."""
