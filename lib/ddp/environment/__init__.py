"""Python environments of jobs: made once, stored as one archive, found by their inputs."""
