"""Messages with tensors between processes of a job that are in no group: framed, authenticated."""
