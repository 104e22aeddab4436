"""Plots of metrics as text, PNG, PDF and SVG, and the HTML report of a job."""
