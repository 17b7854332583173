"""From an operator call on tensor specs to a plan: which placements, what communication, what each device runs."""
