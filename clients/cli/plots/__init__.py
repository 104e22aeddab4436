"""Curves as text, PNG and SVG, and the HTML report."""
