"""Output: terminal, tables, curves, the report page."""
