"""How long a step takes, from what was measured on the cluster; what memory it needs."""
