"""Model directories: their files, their sizes, and how a head makes logits. Imports no torch."""
