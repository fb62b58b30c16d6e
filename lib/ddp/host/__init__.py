"""What commands on this host leave for each other: locks, and waits that one may end."""
