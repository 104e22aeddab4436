"""`distill eval`: models answer prompts many times, and a reward judges them."""
