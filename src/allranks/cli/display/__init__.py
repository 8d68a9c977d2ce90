"""What a person sees of a running job: lines, bars, faults."""
