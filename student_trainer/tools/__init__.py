"""Programs that make small models and data for demos and tests."""
