"""Token ids of prompts and answers, and the tokens of a tokenizer. Does not import torch."""
