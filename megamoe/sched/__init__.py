"""Which tile next, which knobs: integer functions."""
