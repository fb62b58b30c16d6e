"""The programs of jobs, on the nodes: standard library only, any Python from 3.10 on."""
