"""What every room stands on: errors, files that appear whole, the lines of the log, and reports to the launcher."""
