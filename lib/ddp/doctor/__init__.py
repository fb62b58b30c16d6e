"""Examine the cluster as the user: a probe on the nodes, and rules over its reports."""
