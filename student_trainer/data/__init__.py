"""The data of training: prompts and their order, token sequences, batches, captured stores."""
