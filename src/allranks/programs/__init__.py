"""Ready-made tasks that ship with the package: `allranks train NAME`."""
