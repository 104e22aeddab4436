"""Everything light that a person or a program calls. Importing it never loads torch."""
