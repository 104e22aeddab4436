"""The objectives that training minimises, as losses of rows."""
