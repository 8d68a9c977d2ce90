"""Steps that run ahead of the host: what it would wait for is read while the next step runs."""
