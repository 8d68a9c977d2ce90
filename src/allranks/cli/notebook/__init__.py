"""Jobs that a script or a notebook starts: `allranks.launch(task, ranks=4)`."""
