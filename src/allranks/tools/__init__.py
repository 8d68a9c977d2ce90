"""Questions about a job that train nothing themselves: check, doctor, sweep."""
