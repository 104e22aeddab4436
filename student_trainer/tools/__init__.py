"""Programs that create small models and data sets for demos and tests, and measure accuracy."""
