"""The scoring head: computes rows from hidden states, and draws tail samples."""
