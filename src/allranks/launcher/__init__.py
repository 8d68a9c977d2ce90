"""From a request to processes: what is started where, watched, stopped and tried again."""
