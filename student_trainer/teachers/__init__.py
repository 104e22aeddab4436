"""Where teacher rows come from: remote services and the EMA anchor."""
