"""How jobs show themselves: as text, as HTML of a notebook, as tables, and live."""
