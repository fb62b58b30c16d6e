"""Files that commands on this host share: locks, waits that a user can end, texts written whole."""
