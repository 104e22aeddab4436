"""Plots as text, PNG, PDF and SVG, and the HTML report."""
