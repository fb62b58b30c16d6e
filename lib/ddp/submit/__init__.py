"""From options to a job: checks, resources, datasets, the files of a run, and its submission."""
