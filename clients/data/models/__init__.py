"""Model directories: their files, their sizes, and the computation of logits. Does not import
torch.
"""
