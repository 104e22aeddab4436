"""The program of `distill eval`: models answer prompts many times, a reward scores the answers."""
