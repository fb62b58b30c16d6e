"""Results, tables and progress: values that every front end renders."""
