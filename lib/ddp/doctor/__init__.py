"""Examine the cluster as the user: probes on the nodes, and rules that turn what they return into findings."""
