"""Random records, chat templates, tokenizers and model directories, against independent readers."""
