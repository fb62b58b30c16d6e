"""The base of every room: errors, atomic files, the log's lines, and reports to the launcher."""
