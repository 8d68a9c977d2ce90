"""The page of benches: scaling beside the ideal, efficiency, memory, exchange, bytes, sweeps."""
