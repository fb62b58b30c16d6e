"""What takes a node out of service for a while: GPU resets and MIG layouts."""
