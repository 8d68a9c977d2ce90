"""Why a job differs from one process: causes, each with its repair, which must make it equal."""
