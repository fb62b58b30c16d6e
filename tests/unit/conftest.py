"""What the tests of every charm share."""

import yaml

# Scenario writes and reads charmcraft.yaml for every event, which by Python's own code is most of what a test costs
yaml.SafeLoader, yaml.SafeDumper = yaml.CSafeLoader, yaml.CSafeDumper
